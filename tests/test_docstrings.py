"""The docstring of every public name is complete, and its examples run. A planted gap is found.

Examples run on four ranks, which are threads here, as 2 groups of 2. All ranks execute an example, and its
output is compared on rank 0. Therefore examples show values and print nothing.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import doctest
import functools
import inspect
import io
import re
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import hpcsgd
import hpcsgd.comm
from hpcsgd.comm import Communicator, threads
from hpcsgd.core import averager, method, optional, step
from hpcsgd.core.optional import WithCommOps, WithMemory, WithSearch
from hpcsgd.core.topology import form
from hpcsgd.data import Partition
from hpcsgd.parts.averagers.selection import Selection
from hpcsgd.parts.grad_reduces.by_torch import Separable
from hpcsgd.parts.grad_reduces.error_feedback import Feedback
from hpcsgd.parts.quantizers.base import Rounding
from hpcsgd.parts.sparsifiers import Sparsifier
from hpcsgd.parts.sparsifiers.base import Adapting, Foreseeing
from public_names import public

ORDER = ("Args", "Returns", "Raises", "Shape", "Note", "Example", "References", "See Also")
SECTIONS = re.compile(rf"^({'|'.join(ORDER)}):$", re.MULTILINE)
SUMMARY = re.compile(rf"(?!({'|'.join(ORDER)}):)(\S+ ){{2,}}.+\.")
RAISES = re.compile(r"\braise (\w+\.)?(User|Job)Error\b")
NO_PAPER = {
    "AverageState", "Dirichlet", "DistributedOptimizer", "JobError", "ChainedOptimizer", "Loader", "Method",
    "ResetState", "Sampler", "Topology", "UserError", "allreduce", "barrier", "broadcast",
    "graphs.Complete", "graphs.Graph", "graphs.senders", "init", "keep_state", "equal_batches",
    "load", "outer_schedules.piecewise", "save",
}  # fmt: skip
"""Names that need no reference to a paper."""
PROTOCOLS = (
    Adapting, averager.Averager, method.HoldsModel, optional.Composed, optional.Late, optional.Prepares,
    optional.Stateful, optional.Wrapping, step.GroupGradReduce, step.QuantizedGather,
    Feedback, Foreseeing, WithMemory, Partition, Rounding, WithSearch, Selection, WithCommOps, Separable,
    Sparsifier, hpcsgd.graphs.Graph,
)  # fmt: skip
"""Protocols that document their members, so that classes with these members need not."""
SAMPLES = 64
OF_PROCESSES = {"fully_shard"}
"""Names whose examples need processes, because torch.distributed does not support ranks that are threads."""


def faults(name: str, documented: Any) -> list[str]:
    """Return what is missing in the docstring of a function or a class, and in those of its members."""
    text = inspect.cleandoc(documented.__doc__ or "")
    parts = sections(text)
    found = [] if SUMMARY.fullmatch(text.split("\n")[0]) else ["no summary of one line"]
    if [*parts] != [section for section in ORDER if section in parts]:
        found.append(f"sections in another order than {', '.join(ORDER)}")
    found += [f"argument {p.name}: {fault}" for p in arguments(documented) if (fault := missing(p, parts))]
    if (
        RAISES.search(inspect.getsource(documented).replace(documented.__doc__ or "", ""))
        and "Raises" not in parts
    ):
        found.append("raises UserError and does not say so")
    if ">>> " not in parts.get("Example", ""):
        found.append("no example")
    if "not to be confused with" in text.lower():
        found.append("what it is not to be confused with belongs into the glossary")
    if ("References" in parts) == (name in NO_PAPER):
        found.append("references, though none are expected" if name in NO_PAPER else "no references")
    if not isinstance(documented, type) and returns(documented) and "Returns" not in parts:
        found.append("does not say what it returns")
    if takes_tensors(documented) and "Shape" not in parts:
        found.append("takes tensors and does not say of which shape")
    if isinstance(documented, type):
        found += [f"{member}: {fault}" for member, fault in faults_of_members(documented)]
    return [f"{name}: {fault}" for fault in found]


def sections(text: str) -> dict[str, str]:
    parts = SECTIONS.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def arguments(documented: Any) -> list[inspect.Parameter]:
    """Return the arguments that a caller can name. A class has some only if it defines `__init__`."""
    if isinstance(documented, type) and documented.__init__ in (object.__init__, ValueError.__init__):
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(documented).parameters.values()
    return [p for p in parameters if p.kind not in variable]


def returns(function: Any) -> bool:
    return inspect.signature(function).return_annotation not in (None, "None", inspect.Signature.empty)


def takes_tensors(documented: Any) -> bool:
    return any(re.search(r"\bTensor\b", str(p.annotation)) for p in arguments(documented))


def missing(argument: inspect.Parameter, parts: Mapping[str, str]) -> str | None:
    entries = re.split(r"^    (\w+): ", parts.get("Args", ""), flags=re.MULTILINE)
    told = dict(zip(entries[1::2], entries[2::2], strict=True))
    if argument.name not in told:
        return "not told of"
    if argument.default is inspect.Parameter.empty:
        return None
    default = f"Default {written(argument.default)}"
    return None if default in " ".join(told[argument.name].split()) else f"expected {default!r}"


def written(default: Any) -> str:
    """Return the default as a user would write it, or an empty string where that is too long."""
    if isinstance(default, types.FunctionType):
        return default.__name__
    plain = isinstance(default, int | float | str | tuple | None) or dataclasses.is_dataclass(default)
    return repr(default) if plain else ""


def faults_of_members(documented: type) -> Iterator[tuple[str, str]]:
    """Yield the faults of methods and properties of hpcsgd, in the class and in its base classes."""
    documented_elsewhere = {member for protocol in PROTOCOLS for member in told_by(protocol, documented)}
    ours = [kind for kind in documented.__mro__ if kind.__module__.startswith("hpcsgd.")]
    for name in dict.fromkeys(name for kind in ours for name in vars(kind)):
        functions = [f for kind in ours if (f := function(vars(kind).get(name))) is not None]
        if name.startswith("_") or name in documented_elsewhere or not functions:
            continue
        text = next((inspect.cleandoc(f.__doc__) for f in functions if f.__doc__), None)
        if text is None:
            yield name, "no docstring"
            continue
        for argument in list(inspect.signature(functions[0]).parameters)[1:]:
            if argument != "_" and not re.search(rf"`{argument}\b|^    {argument}: ", text, re.MULTILINE):
                yield name, f"argument {argument}: not told of"


def function(member: Any) -> types.FunctionType | None:
    """Return the function of a method or property, or None."""
    made_of = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return made_of if isinstance(made_of, types.FunctionType) else None


def told_by(protocol: type, documented: type) -> set[str]:
    """Return the members of the protocol if the class has all its methods, or else an empty set."""
    kinds = [kind for kind in protocol.__mro__ if kind.__module__.startswith("hpcsgd.")]
    members = {name: value for kind in kinds for name, value in vars(kind).items() if name[0] != "_"}
    methods = [name for name, value in members.items() if isinstance(value, types.FunctionType)]
    return set(members) if all(hasattr(documented, name) for name in methods) else set()


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder()
    found = [test for name, documented in public().items() for test in finder.find(documented, name)]
    return [test for test in found if test.examples]


here = threading.local()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `hpcsgd.init()` use the ranks of the example, without starting MPI."""
    mpi = types.SimpleNamespace(world=lambda timeout=0.0: here.world)
    monkeypatch.setitem(sys.modules, "hpcsgd.comm.mpi", mpi)
    monkeypatch.setitem(sys.modules, "hpcsgd.comm.mpi_library", mpi)  # otherwise its import starts MPI
    monkeypatch.setattr(hpcsgd.comm, "mpi", mpi, raising=False)


def run_on(world: Communicator, example: doctest.DocTest, folder: Path) -> str:
    """Return what doctest reports on rank 0. The other ranks execute the same code."""
    here.world = world
    given = {name: value for name, value in example.globs.items() if not name.startswith("__")}
    names = setting(world) | {"folder": folder} | given
    if world.rank > 0:
        for each in example.examples:
            with suppress(*[Exception] if each.exc_msg else []):
                exec(compile(each.source, example.name, "exec", dont_inherit=True), names)
        return ""
    complaints = io.StringIO()
    told = doctest.DocTest(
        example.examples, names, example.name, example.filename, example.lineno, example.docstring
    )
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(told, out=complaints.write)
    return complaints.getvalue()


@functools.cache
def start() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def setting(world: Communicator) -> dict[str, Any]:
    """Return the names that examples may use, which the docstring of hpcsgd promises."""
    model, criterion = copy.deepcopy(start()), nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(SAMPLES, 4, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    )

    def train(optimizer: optim.Optimizer, steps: int) -> None:
        for t in range(steps):
            x, y = data[torch.arange(world.rank + t, SAMPLES, world.size).tolist()]
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return {
        "hpcsgd": hpcsgd, "torch": torch, "DataLoader": DataLoader,
        "topology": form(world, groups=2), "model": model, "optimizer": optim.SGD(model.parameters(), lr=0.1),
        "data": data, "criterion": criterion, "train": train,
    }  # fmt: skip


@pytest.mark.parametrize("name", public())
def test_help_is_complete(name: str) -> None:
    assert faults(name, public()[name]) == []


@pytest.mark.parametrize(
    "example", [x for x in examples() if x.name not in OF_PROCESSES], ids=lambda example: example.name
)
@pytest.mark.usefixtures("launched")
def test_examples_run(example: doctest.DocTest, tmp_path: Path) -> None:
    assert threads.run(4, run_on, example, tmp_path, timeout=60.0)[0] == ""


@pytest.mark.processes
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "example", [x for x in examples() if x.name in OF_PROCESSES], ids=lambda example: example.name
)
def test_examples_run_on_processes(run, example: doctest.DocTest, tmp_path: Path) -> None:
    assert run(4, run_on, example, tmp_path)[0] == ""


def imported(file: Path) -> list[ast.alias]:
    body = ast.parse(file.read_text()).body
    return [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]


def test_each_public_name_is_written_down_once() -> None:
    """Type checkers read the stub, where a name is public only as `from … import x as x`.

    For methods the stub has `*`, and the `__init__.py` of their package has the names in this form.
    """
    stub, methods = Path(hpcsgd.__file__).with_suffix(".pyi"), Path(hpcsgd.__file__).parent / "methods"
    aliases = [alias for alias in imported(stub) if alias.name != "*"]
    assert len(imported(stub)) == len(aliases) + 1
    aliases += [alias for alias in imported(methods / "__init__.py") if alias.name != "METHODS"]
    assert [alias.asname for alias in aliases] == [alias.name for alias in aliases]
    assert sorted(alias.name for alias in aliases) == hpcsgd.__all__
    own = {name: value for name, value in vars(hpcsgd).items() if name in hpcsgd.__all__}
    assert all(getattr(hpcsgd, name) is not None for name in hpcsgd.__all__)
    assert all(isinstance(value, types.ModuleType) for value in own.values()), "imported when asked for"
    source = Path(hpcsgd.__file__).read_text().partition(hpcsgd.__doc__ or "")[2]
    assert [name for name in hpcsgd.__all__ if re.search(rf"\b{name}\b", source)] == []
    assert {*hpcsgd.__all__} <= {*dir(hpcsgd)}


def test_those_without_a_paper_exist() -> None:
    assert public().keys() >= NO_PAPER


def complete(every: int = 8) -> int:
    """Return the number of steps.

    Args:
        every: Steps. Default 8.

    Returns:
        The same number.

    Example:
        >>> 1 + 1
        2

    References:
        Somebody, somewhere.
    """
    return every


@pytest.mark.parametrize(
    ("gap", "fault"),
    [
        (" the number of", "no summary of one line"),
        ("    every: Steps. Default 8.", "argument every: not told of"),
        ("Returns:", "does not say what it returns"),
        ("Default 8", "argument every: expected 'Default 8'"),
        (">>> ", "no example"),
        ("References:", "no references"),
    ],
)
def test_a_gap_is_found(gap: str, fault: str) -> None:
    planted = types.FunctionType(complete.__code__, {}, "complete", complete.__defaults__)
    planted.__annotations__ = complete.__annotations__
    planted.__doc__ = inspect.cleandoc(complete.__doc__ or "")
    assert faults("planted", planted) == []
    planted.__doc__ = planted.__doc__.replace(gap, "")
    assert faults("planted", planted) == [f"planted: {fault}"]


def test_another_order_is_found() -> None:
    planted = types.FunctionType(complete.__code__, {}, "complete", complete.__defaults__)
    planted.__annotations__ = complete.__annotations__
    head, returned, rest = re.split(r"^    (?=Returns:|Example:)", complete.__doc__ or "", flags=re.MULTILINE)
    planted.__doc__ = inspect.cleandoc(f"{head}    {rest.rstrip()}\n\n    {returned}")
    assert faults("planted", planted) == [f"planted: sections in another order than {', '.join(ORDER)}"]


def test_a_tensor_without_a_shape_and_a_confusable_are_found() -> None:
    def given(x: torch.Tensor) -> None:
        """Take a tensor `x`. Not to be confused with `y`.

        Args:
            x: A tensor.

        Example:
            >>> 1 + 1
            2

        References:
            Somebody, somewhere.
        """

    assert faults("planted", given) == [
        "planted: what it is not to be confused with belongs into the glossary",
        "planted: takes tensors and does not say of which shape",
    ]


def test_a_silent_exception_is_found() -> None:
    def raising() -> None:
        raise hpcsgd.UserError("no")

    raising.__doc__ = complete.__doc__
    assert faults("planted", raising) == ["planted: raises UserError and does not say so"]


def test_gaps_in_members_are_found() -> None:
    class Planted:
        def told(self, much: int) -> None:
            """So `much`."""

        def half(self, much: int) -> None:
            """How much?"""

        def silent(self) -> None: ...

        def state_dict(self) -> None: ...

        def load_state_dict(self, state: Any) -> None: ...

    Planted.__module__ = "hpcsgd.planted"
    expected = [("half", "argument much: not told of"), ("silent", "no docstring")]
    assert list(faults_of_members(Planted)) == expected


def test_an_example_that_shows_something_else_is_found(tmp_path: Path) -> None:
    shown = doctest.Example("hpcsgd.lr_scale('linear', 4)\n", "5.0\n")
    example = doctest.DocTest([shown], {}, "planted", None, None, None)
    assert "Failed example" in threads.run(4, run_on, example, tmp_path)[0]
