"""Where in the job file a mistake is: the line of the key that a message is about, behind the file's name."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcsgd.config import lines
from hpcsgd.errors import UserError, shortened
from hpcsgd.files.reading import read_text

_SECTION = re.compile(r"\[(?P<name>[^\]\s]+)(?: (?P<number>\d+))?\]")
_HINTS = re.compile(r"; |: did you mean |Allowed: ")


@contextmanager
def at_line(file: Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """A `UserError` raised inside that names this job file, and a key that stands there, names its line, too.

    Not where it may be due to one of the overrides: rather no line than a wrong one.
    """
    try:
        yield
    except UserError as error:
        message = str(error)
        line = line_of(message, file, overrides)
        if line is None:
            raise
        raise type(error)(message.replace(f"{file}: ", f"{file}:{line}: ", 1)) from error


def line_of(message: str, file: Path, overrides: Sequence[str] = ()) -> int | None:
    """Of the key that a message is about which begins with the file's name; None where that is not sure."""
    if not message.startswith(f"{file}: "):
        return None
    about = message.removeprefix(f"{file}: ")
    try:
        text = read_text(file)
        tables = tomllib.loads(text)
    except (ValueError, RecursionError):
        return None
    places = lines.lines(text)
    path = _path(about, places)
    if not path or path not in places or _is_another(about, path, tables):
        return None
    due_to_a_flag = bool(overrides) if path == _section(about) else _is_overridden(path, overrides)
    return None if due_to_a_flag else places[path]


def _path(about: str, places: Mapping[lines.Path, int]) -> lines.Path:
    """The key, or else the section, of what begins as ``[section] key …`` or ``[section]: … key = …``."""
    path = section = _section(about)
    rest = _SECTION.sub("", about, count=1) if section else about
    for word in re.split(r"[:=]", rest, maxsplit=1)[0].split():
        if (*path, word) not in places:
            break
        path = (*path, word)
    if path != section or not rest.startswith(":"):
        return path
    said = _HINTS.split(rest)[0]
    mentions = {
        found.start(): key
        for key in places
        if key[:-1] == section
        and (found := re.search(rf"(?<![\w.]){re.escape(str(key[-1]))} = |'{key[-1]}'", said))
    }
    return mentions[min(mentions)] if mentions else section


def _section(about: str) -> lines.Path:
    match = _SECTION.match(about)
    if match is None:
        return ()
    return (*match["name"].split("."), *([int(match["number"]) - 1] if match["number"] else []))


def _is_overridden(path: lines.Path, overrides: Sequence[str]) -> bool:
    """Whether a flag has to do with it, or with what is in it."""
    flags = [word.removeprefix("--").partition("=")[0].split(".") for word in overrides if word[:2] == "--"]
    return any(flag[: len(path)] == list(path)[: len(flag)] for flag in flags)


def _is_another(about: str, path: lines.Path, tables: Any) -> bool:
    """Whether the message has another value than the file."""
    value = tables
    for key in path:
        value = value[key]
    told = re.search(rf"(?<!\w){re.escape(str(path[-1]))} = (.*)", about)
    if told is None or isinstance(value, Mapping):
        return False
    spellings = (str(value), repr(value), json.dumps(value, default=str, ensure_ascii=False))
    return not told[1].startswith((*spellings, *map(shortened, spellings)))
