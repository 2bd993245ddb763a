"""One-line changes of the product that a test ought to notice: their places, and the changed lines."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OPERATORS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
"""The replacement of each operator."""
COMPOUND = (ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Lambda, ast.NamedExpr)
"""The expressions that need parentheses when they are an operand."""
Site = tuple[ast.expr | ast.stmt, str]
"""A node that stands on one line, and the text that takes its place."""


@dataclass(frozen=True)
class Mutant:
    """A file of which one line is changed."""

    file: str
    line: int
    before: str
    after: str

    @property
    def package(self) -> str:
        """The folder below the package's root, or the root itself for the modules in it."""
        return "/".join(Path(self.file).parts[:-1][:2])

    @property
    def key(self) -> tuple[str, str, str]:
        """Identify the mutant independently of its line number."""
        return self.file, self.before.strip(), self.after.strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before.strip()}  →  {self.after.strip()}"

    def applied(self, text: str) -> str:
        """Return the file's `text` with the line changed."""
        lines = text.splitlines(keepends=True)
        assert lines[self.line - 1].rstrip("\n") == self.before, "the file has changed since"
        lines[self.line - 1] = self.after + "\n"
        return "".join(lines)


def mutants(root: Path, paths: list[str]) -> list[Mutant]:
    """Return every mutant of `paths`, Python files and folders of `root`, in a fixed order."""
    given = [root / path for path in paths]
    files = {file for path in given for file in (path.rglob("*.py") if path.is_dir() else [path])}
    return [
        mutant
        for file in sorted(files)
        for mutant in mutants_of(file.relative_to(root).as_posix(), file.read_text())
    ]


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Return the mutants of one file, by line."""
    lines = text.splitlines()
    found: dict[Mutant, None] = {}
    for node, new in _sites(ast.parse(text)):
        if node.lineno != node.end_lineno:
            continue
        before = lines[node.lineno - 1]
        encoded = before.encode()  # columns count bytes
        after = (encoded[: node.col_offset] + new.encode() + encoded[node.end_col_offset :]).decode()
        if after != before:
            found[Mutant(file, node.lineno, before, after)] = None
    return sorted(found, key=lambda mutant: mutant.line)


def draw(found: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants in random order: from each package in proportion to its size, but at least one."""
    by_package: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in found:
        by_package[mutant.package].append(mutant)
    dice = random.Random(seed)
    drawn: list[Mutant] = []
    for _, own in sorted(by_package.items()):
        dice.shuffle(own)
        share = max(1, int(count * len(own) / len(found)))
        drawn += own[:share]
        del own[:share]
    left = [mutant for _, own in sorted(by_package.items()) for mutant in own]
    drawn += dice.sample(left, min(len(left), max(0, count - len(drawn))))
    return dice.sample(drawn, min(count, len(drawn)))


def _sites(tree: ast.AST) -> Iterator[Site]:
    """Yield the places of `tree` that can change, without what only people and type checkers read."""
    for node in _executed(tree):
        match node:
            case ast.Compare(left, [op], [right]):
                yield node, f"{_text(left)} {OPERATORS[type(op)]} {_text(right)}"
            case ast.BinOp(left, op, right) if type(op) in OPERATORS and not _is_text(left):
                yield node, f"({_text(left)} {OPERATORS[type(op)]} {_text(right)})"
            case ast.BoolOp(op, values):
                yield node, "(" + f" {OPERATORS[type(op)]} ".join(map(_text, values)) + ")"
            case ast.UnaryOp(ast.Not(), operand) | ast.UnaryOp(ast.USub(), operand):
                yield node, f"({ast.unparse(operand)})"
            case ast.Constant(bool(value)):
                yield node, str(not value)
            case ast.Constant(int(value) | float(value)):
                yield node, f"{value + 1}"
            case ast.AugAssign(target, op, value) if type(op) in OPERATORS:
                yield node, f"{_text(target)} {OPERATORS[type(op)]}= {_text(value)}"
            case ast.Expr(ast.Call()):
                yield node, "pass"
            case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
                yield node, "return None"
            case ast.If(test) | ast.While(test) | ast.IfExp(test):
                yield test, f"(not {_text(test)})"


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield `node` and what is below it, except annotations, messages, texts and assertions."""
    unread: list[ast.AST | None] = []
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            if node.name in {"__repr__", "__str__"}:
                return
            unread = [node.returns, *node.decorator_list]
        case ast.ClassDef():
            unread = [*node.decorator_list]
        case ast.arg():
            unread = [node.annotation]
        case ast.AnnAssign():
            unread = [node.annotation]
        case ast.Raise() | ast.JoinedStr() | ast.Assert():
            return
        case ast.If(ast.Name("TYPE_CHECKING")):
            return
        case ast.Subscript(ast.Name(name)) if name[:1].isupper():  # Mapping[str, int]
            return
    yield node
    for child in ast.iter_child_nodes(node):
        if child not in unread:
            yield from _executed(child)


def _text(node: ast.AST) -> str:
    return f"({ast.unparse(node)})" if isinstance(node, COMPOUND) else ast.unparse(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
