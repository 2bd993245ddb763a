"""Classes are abstract or final: none overrides a method of another, and no code asks for an object's class.

To change what a class does, wrap it. A protocol says what can be done with an object, and code may ask for
it (`isinstance(part, Stateful)`). Code may also ask for an abstract class with several subclasses, for the
class of an exception, and for the kinds of values of a job file and of `Waits`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HANDED_OVER = "what a user has handed over is one of ours, or of torch's or the user's own"
SAME = "two forms of one value, which are made and told apart in this file"
ASKED: Mapping[tuple[str, str], str] = {
    ("checkpoint/in_scripts.py", "DistributedOptimizer"): HANDED_OVER,
    ("checkpoint/items.py", "DistributedOptimizer"): HANDED_OVER,
    ("data/injection.py", "InjectedBatches"): HANDED_OVER,
    ("data/sampler.py", "Topology"): HANDED_OVER,
    (
        "data/image_files.py",
        "Drawn",
    ): "a DataLoader hands over rows that a sampler has drawn, or others",
    ("data/pairs.py", "Drawn"): "the same",
    ("data/split.py", "Drawn"): "the same",
    ("data/split.py", "Batch"): "a DataLoader hands over a batch that was read whole, or single samples",
    ("engine/initial_state.py", "ChainedOptimizer"): HANDED_OVER,
    ("engine/chained.py", "ChainedOptimizer"): HANDED_OVER,
    ("engine/scaling.py", "DistributedOptimizer"): HANDED_OVER,
    ("engine/wrapping.py", "Guarded"): HANDED_OVER,
    ("engine/natural_gradient/optimizer.py", "DistributedOptimizer"): HANDED_OVER,
    ("lightning/loaders.py", "Sampler"): HANDED_OVER,
    ("lightning/precision.py", "GradScaler"): HANDED_OVER,
    ("models/gpt.py", "IntoTheSum"): "torch's own way of finding layers, to give them their first weights",
    ("models/transformer.py", "Projections"): "the same",
    ("models/sync_batch_norm.py", "SyncBatchNorm"): HANDED_OVER,
    ("checkpoint/tree.py", "UnreadTensor"): "an assertion",
    ("cli/words.py", "KeysOf"): "one of the marks of an annotation, as typing has them",
    ("core/method.py", "Method"): "a method is no part: it has some",
    ("comm/comm_thread.py", "Work"): SAME,
    ("performance/comparing.py", "Config"): SAME,
    ("train/elastic_run.py", "Batches"): "an assertion",
}
"""For each file and class, the reason why the file asks for it. Entries may only be removed."""
FREE = ("config/", "errors.py")
VALUES = "core/waits.py"
"""Its classes are the kinds of one value and contain data only. Code distinguishes them by `match`."""


@dataclass(frozen=True)
class Class:
    """One class of the package."""

    file: str
    node: ast.ClassDef

    @property
    def protocol(self) -> bool:
        return any(ast.unparse(base).split("[")[0].endswith("Protocol") for base in self.node.bases)

    @property
    def abstract(self) -> bool:
        return any(is_abstract(each) for each in self.methods.values())

    @property
    def methods(self) -> Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]:
        functions = [x for x in self.node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
        return {x.name: x for x in functions}


def is_abstract(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("abstractmethod" in ast.unparse(each) for each in method.decorator_list)


class Package:
    """All modules of a tree, and the classes that their names refer to."""

    def __init__(self, root: Path) -> None:
        files = sorted((root / "hpcsgd").rglob("*.py"))
        self.trees = {str(f.relative_to(root / "hpcsgd")): ast.parse(f.read_text()) for f in files}

    @cached_property
    def _own(self) -> Mapping[str, Mapping[str, Class]]:
        return {
            file: {node.name: Class(file, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
            for file, tree in self.trees.items()
        }

    @cached_property
    def _imported(self) -> Mapping[str, Mapping[str, str]]:
        return {
            file: {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "hpcsgd"
                for alias in node.names
            }
            for file, tree in self.trees.items()
        }

    def named(self, file: str, name: str) -> Class | None:
        """Return the class of hpcsgd that `name` means in `file`, or None. A module may precede the name."""
        if name in self._own[file]:
            return self._own[file][name]
        first, _, rest = name.partition(".")
        path = self._imported[file].get(first)
        return None if path is None else self._in_module(path, rest)

    def _in_module(self, path: str, rest: str) -> Class | None:
        parts = [*path.split(".")[1:], *filter(None, rest.split("."))]
        *folders, name = parts
        for file in (f"{'/'.join(folders)}.py", "/".join([*folders, "__init__.py"])):
            if file in self.trees:
                return self.named(file, name)
        return None

    def classes(self) -> Iterator[Class]:
        for own in self._own.values():
            yield from own.values()

    def above(self, of: Class) -> Iterator[Class]:
        for base in of.node.bases:
            found = self.named(of.file, ast.unparse(base).split("[")[0])
            if found is not None and found.node is not of.node:
                yield found
                yield from self.above(found)

    def is_error(self, of: Class) -> bool:
        ends = ("Error", "Exception", "KeyboardInterrupt")
        return any(
            ast.unparse(base).endswith(ends) for each in (of, *self.above(of)) for base in each.node.bases
        )


@cache
def read(root: Path) -> Package:
    return Package(root)


def overriding(root: Path) -> list[str]:
    """Return the methods that override a method of another class of the package."""
    package = read(root)
    return [
        f"{each.file}: {each.node.name}.{name} overrides {other.node.name}"
        for each in package.classes()
        for other in package.above(each)
        if not other.protocol
        for name in each.methods
        if name in other.methods and not is_abstract(other.methods[name]) and name[:2] != "__"
    ]


def asking(root: Path) -> set[tuple[str, str]]:
    """Return the files that ask for a class of the package without permission, each with that class."""
    package = read(root)
    found: set[tuple[str, str]] = set()
    for file, tree in package.trees.items():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                    names = [
                        ast.unparse(x) for x in ast.walk(kinds) if isinstance(x, ast.Name | ast.Attribute)
                    ]
                case ast.MatchClass(cls=kind):
                    names = [ast.unparse(kind)]
                case _:
                    continue
            known = [x for name in names if (x := package.named(file, name)) is not None]
            concrete = [x for x in known if not (x.protocol or x.abstract or package.is_error(x))]
            found |= {(file, x.node.name) for x in concrete if not file.startswith(FREE) and x.file != VALUES}
    return found


@pytest.mark.slow
def test_no_class_overrides_a_method_of_another() -> None:
    assert overriding(ROOT) == []


@pytest.mark.slow
def test_nobody_asks_by_class() -> None:
    found = asking(ROOT)
    assert found - ASKED.keys() == set()
    assert ASKED.keys() - found == set(), "mended: take it off the list"


def test_both_are_found(tmp_path: Path) -> None:
    files = {
        "a.py": "class A:\n  def f(self): return 1\n  def g(self): return 2\n",
        "b.py": "from hpcsgd.a import A\nclass B(A):\n  def f(self): return 2\n  def h(self): ...\n",
        "c.py": "from hpcsgd import a, b\nclass C(b.B):\n  def g(self): ...\nisinstance(x, int | a.A)\n",
        "d.py": "class D(ABC):\n  @abstractmethod\n  def f(self): ...\n"
        "class E(D):\n  def f(self): ...\n"
        "class P(Protocol):\n  def f(self): ...\nclass Q(P):\n  def f(self): ...\n"
        "class Bad(ValueError): ...\nisinstance(x, (D, P, Bad, int))\nmatch x:\n  case E(): ...\n",
    }
    for name, text in files.items():
        path = tmp_path / "hpcsgd" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert overriding(tmp_path) == ["b.py: B.f overrides A", "c.py: C.g overrides A"]
    assert asking(tmp_path) == {("c.py", "A"), ("d.py", "E")}
