"""Add to errors about a TOML file the line number of the key that caused the error."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcsgd.config import lines
from hpcsgd.errors import About, KeyPath, UserError
from hpcsgd.files.reading import read_text


@contextmanager
def at_line(file: Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Add a line number to a `UserError` that the block raises about a key of `file`.

    No line is added if one of the overrides may have caused the error, because a wrong line would mislead.
    """
    try:
        yield
    except UserError as error:
        line = line_of(error.about, file, overrides)
        if line is None:
            raise
        raise type(error)(error.message, file=f"{file}:{line}") from error


def line_of(about: About, file: Path, overrides: Sequence[str] = ()) -> int | None:
    """Return the line of the key that an error is about, or of its section if the key is missing.

    Return None if the line is uncertain.
    """
    if about.file != str(file):
        return None
    try:
        text = read_text(file)
        tables: Any = tomllib.loads(text)
    except (ValueError, RecursionError):
        return None
    places = lines.lines(text)
    path = next((path for path in _outwards(about.key) if path in places), None)
    if path is None:
        return None
    for key in path:
        tables = tables[key]
    is_another = path == about.key and _differs(about.value, tables)
    return None if is_another or _is_overridden(path, tables, overrides) else places[path]


def _outwards(path: KeyPath) -> Iterator[KeyPath]:
    while path:
        yield path
        path = path[:-1]


def _differs(reported: object, value: Any) -> bool:
    """Return True if the value that an error `reported` is not the file's, but one of an override, say."""
    return not (
        reported is None or isinstance(value, Mapping) or reported == value or str(reported) == str(value)
    )


def _is_overridden(path: KeyPath, value: Any, overrides: Sequence[str]) -> bool:
    """Return True if an override may have changed the value at `path`.

    For a section, any override counts; for a table in a section, any override of that section.
    """
    flags = [tuple(word[2:].partition("=")[0].split(".")) for word in overrides if word[:2] == "--"]
    if not isinstance(value, Mapping):
        return any(flag[: len(path)] == path[: len(flag)] for flag in flags)
    return bool(flags) if len(path) == 1 else any(flag[0] == path[0] for flag in flags)
