"""Find the line number of each key in a TOML file, because tomllib only knows those of syntax errors."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from hpcsgd.errors import KeyPath

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|' r"'''.*?'{3,5}|" r'"(?:\\.|[^"\\\n])*"|' r"'[^'\n]*'", re.DOTALL
)
_BARE = re.compile(r"[\w-]+", re.ASCII)
_PLAIN = re.compile(r"[^,\]}#\n]+")


def lines(text: str) -> Mapping[KeyPath, int]:
    """Return the line number of each key, counted from 1; for a table, the first line that names it.

    The result is empty if this module cannot scan `text`, because a wrong line would mislead.
    """
    try:
        known = set(_paths(tomllib.loads(text)))
        found = _Scanner(text).statements()
    except (tomllib.TOMLDecodeError, _Lost, IndexError):
        return {}
    return found if found.keys() == known else {}


def _paths(value: Any, place: KeyPath = ()) -> Iterator[KeyPath]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield (*place, key)
            yield from _paths(inner, (*place, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _paths(inner, (*place, number))


class _Lost(Exception):
    """The error for text that the scanner does not expect."""


class _Scanner:
    """A scanner for the keys of a text that is known to be TOML. It can be used once."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._found: dict[KeyPath, int] = {}
        self._listed: dict[KeyPath, int] = {}
        """For each list of tables, the index of the table that was scanned last."""

    def statements(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._skip(_BLANK) and self._at < len(self._text):
            if self._takes("[["):
                table = self._listed_table()
            elif self._takes("["):
                table = self._under((), self._key(), "]")
            else:
                self._pair(table)
        return self._found

    def _listed_table(self) -> KeyPath:
        path = self._under((), self._key(), "]]")
        self._listed[path] = self._listed.get(path, -1) + 1
        return (*path, self._listed[path])

    def _pair(self, table: KeyPath) -> None:
        self._value(self._under(table, self._key(), "="))

    def _under(self, table: KeyPath, names: list[str], end: str) -> KeyPath:
        """Return the full path of a key, and record its line number and those of its parent tables."""
        line = self._text.count("\n", 0, self._at) + 1
        if not self._takes(end):
            raise _Lost
        for place, name in enumerate(names):
            table = (*table, name)
            self._found.setdefault(table, line)
            if place < len(names) - 1 and table in self._listed:
                table = (*table, self._listed[table])
        return table

    def _key(self) -> list[str]:
        names = [self._name()]
        while self._takes("."):
            names.append(self._name())
        return names

    def _name(self) -> str:
        self._skip(_SPACE)
        raw = self._matched(_STRING) if self._text[self._at : self._at + 1] in ('"', "'") else None
        if raw is not None:
            return next(iter(tomllib.loads(f"{raw} = 0")))
        return self._matched(_BARE)

    def _value(self, path: KeyPath) -> None:
        self._skip(_SPACE)
        if self._takes("{"):
            self._items("}", lambda _: self._pair(path))
        elif self._takes("["):
            self._items("]", lambda number: self._value((*path, number)))
        elif self._text[self._at] in "\"'":
            self._matched(_STRING)
        else:
            self._matched(_PLAIN)

    def _items(self, end: str, item: Any) -> None:
        number = 0
        while self._skip(_BLANK) and not self._takes(end):
            item(number)
            number += 1
            self._skip(_BLANK)
            self._takes(",")

    def _takes(self, word: str) -> bool:
        start = _SPACE.match(self._text, self._at)
        assert start is not None, "nothing matches, too"
        if not self._text.startswith(word, start.end()):
            return False
        self._at = start.end() + len(word)
        return True

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        self._matched(pattern)
        return True

    def _matched(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None or self._at > len(self._text):
            raise _Lost
        self._at = match.end()
        return match[0]
