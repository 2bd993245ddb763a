"""The page of all error messages and warnings, which are found in the sources.

The page has a section for each part of the package. causes.toml lists the parts, with the causes of their
messages and the page that explains more.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from repository import ROOT

OPEN = "…"
"""This stands for the values that a message is formatted with."""
ERRORS = {"UserError": "", "JobError": "", "NoWorld": "", "DivergedError": "", "PeerLost": " (exit code 69)"}
"""The exceptions whose texts are messages, with a note that the page adds."""
LOGS = ("log.warning", "logger.warning")
WARNING = " (a warning)"
TROUBLES = "troubleshooting.md"
QUOTED = re.compile(r"\*\*`(.+?)`\*\*", re.DOTALL)
LETTER = re.compile(r"[^\W\d_]")
PLACEHOLDER = re.compile(r"%[\d.]*[sdgf]|……")


class Unplaced(Exception):
    """A message without a place on the page, or a part of the page without messages."""


@dataclass(frozen=True, order=True)
class Message:
    """A message as a user sees it, with … in place of formatted values."""

    path: str
    """The path of the source, relative to the package's folder."""
    words: str
    kind: str


@dataclass(frozen=True)
class Part:
    """A section of the page: the messages of some sources."""

    title: str
    page: str
    """The page that explains more, with an anchor."""
    of: tuple[str, ...]
    """The beginnings of the sources' paths."""
    cause: str


def page() -> str:
    """Return the text that follows the introduction on docs/messages.md. Raises `Unplaced`."""
    placed = by_part(parts(), found(ROOT / "hpcsgd"))
    told = entries((ROOT / "docs" / TROUBLES).read_text())
    return "".join(_section(part, messages, told) for part, messages in placed)


def parts() -> list[Part]:
    listed = tomllib.loads((Path(__file__).parent / "causes.toml").read_text())["part"]
    return [Part(**{**part, "of": tuple(part["of"])}) for part in listed]


def by_part(known: Sequence[Part], messages: Sequence[Message]) -> list[tuple[Part, list[Message]]]:
    """Return each part with its messages, in the order of their words.

    A message belongs to the part with the longest matching beginning of its path.

    Raises:
        Unplaced: If a message matches no part, or a beginning matches no message.
    """
    places: dict[str, Part] = {start: part for part in known for start in part.of}
    used: dict[str, list[Message]] = {start: [] for start in places}
    for message in messages:
        fitting = [start for start in places if message.path.startswith(start)]
        if not fitting:
            raise Unplaced(f"{message.path}: {message.words!r} has no place: give it one in causes.toml")
        used[max(fitting, key=len)].append(message)
    if empty := [start for start, some in used.items() if not some]:
        raise Unplaced(f"causes.toml: {', '.join(empty)}: no messages come from there")
    return [(part, sorted((x for start in part.of for x in used[start]), key=_by_words)) for part in known]


@cache
def found(package: Path) -> list[Message]:
    """Return all messages of the package, except those that only repeat the text of another message."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    functions = {
        node.name: node for tree in trees.values() for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    return [
        Message(path.relative_to(package).as_posix(), words, kind)
        for path, tree in trees.items()
        for node, kind in _calls(tree)
        for words in Said(tree, functions).by(node)
        if LETTER.search(words)
    ]


def said(node: ast.AST) -> str | None:
    """Return the text of a string literal as a user sees it, or None for any other node."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(x.value) if isinstance(x, ast.Constant) else _filled_in(x) for x in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _filled_in(value: ast.expr) -> str:
    """Return the text in place of a formatted value; a call of `count_text` keeps its noun, in the plural."""
    match value:
        case ast.FormattedValue(
            value=ast.Call(func=ast.Name(id="count_text"), args=[_, ast.Constant(value=str(noun))])
        ):
            return f"{OPEN} {noun}s"
        case _:
            return OPEN


@dataclass(frozen=True)
class Said:
    """The texts that an expression of a source can have. Functions that it calls are found by their names."""

    tree: ast.Module
    functions: Mapping[str, ast.FunctionDef]
    on_the_way: frozenset[str] = frozenset()
    """The names that are being looked up."""

    def by(self, node: ast.AST) -> Iterator[str]:
        """Yield the texts that the expression `node` can have; none if it is not made of string literals."""
        words = said(node)
        if words is not None:
            yield words
        elif isinstance(node, ast.IfExp):
            yield from (*self.by(node.body), *self.by(node.orelse))
        elif isinstance(node, ast.BoolOp):
            yield from (words for value in node.values for words in self.by(value))
        elif isinstance(node, ast.BinOp):
            yield from map("".join, product(self.by(node.left), self.by(node.right)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield from self._behind(node.func.id, self._returned(node.func.id))
        elif isinstance(node, ast.Name):
            yield from self._behind(node.id, self._assigned(node))

    def _behind(self, name: str, values: Iterable[ast.expr]) -> Iterator[str]:
        if name not in self.on_the_way:
            inside = replace(self, on_the_way=self.on_the_way | {name})
            yield from (words for value in values for words in inside.by(value))

    def _returned(self, function: str) -> Iterator[ast.expr]:
        for node in ast.walk(self.functions.get(function, ast.Module([], []))):
            if isinstance(node, ast.Return) and node.value is not None:
                yield node.value

    def _assigned(self, name: ast.Name) -> list[ast.expr]:
        """Return what is assigned to the name where it is used: in that function, or else in the source."""
        functions = (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef))
        around = [function for function in functions if any(node is name for node in ast.walk(function))]
        places = (_assignments(place, name.id) for place in (*around, self.tree))
        return next(filter(None, places), [])


def _assignments(place: ast.AST, name: str) -> list[ast.expr]:
    assigned = (node for node in ast.walk(place) if isinstance(node, ast.Assign))
    return [node.value for node in assigned if [ast.unparse(x) for x in node.targets] == [name]]


def _calls(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield the message argument of each error and warning, with the note for its kind."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ERRORS:
            yield node.args[0], ERRORS[node.func.id]
        elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in LOGS:
            yield node.args[0], WARNING


def entries(text: str) -> dict[str, str]:
    """Return the messages that the troubleshooting page quotes, with the headings above them."""
    told: dict[str, str] = {}
    for section in text.split("\n## ")[1:]:
        heading = section.split("\n", 1)[0]
        told |= {" ".join(x.split()): heading for x in QUOTED.findall(section)}
    return told


def hears(words: str, quoted: str) -> bool:
    """Return True if the message `words` contains the text `quoted`, without … and colons at its ends."""
    return quoted.strip(f"{OPEN} :") in PLACEHOLDER.sub(OPEN, words)


def _section(part: Part, messages: Sequence[Message], told: Mapping[str, str]) -> str:
    items = dict.fromkeys(f"- {shown(x)}{_more(x.words, told)}\n" for x in messages)
    name = part.page.partition(".md")[0].replace("_", " ")
    more = f"More: [{name}]({part.page})."
    return f"\n## {part.title}\n\n{part.cause.strip()} {more}\n\n{''.join(items)}"


def shown(message: Message) -> str:
    words = PLACEHOLDER.sub(OPEN, message.words).replace("%%", "%")
    return f"`` {' '.join(words.split())} ``{message.kind}"


def _more(words: str, told: Mapping[str, str]) -> str:
    heading = next((told[x] for x in told if hears(words, x)), None)
    return "" if heading is None else f": [{heading}]({TROUBLES}#{heading.lower().replace(' ', '-')})"


def _by_words(message: Message) -> tuple[Any, ...]:
    return message.words.lstrip(f"{OPEN} -[").lower(), message
