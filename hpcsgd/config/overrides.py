"""Command-line overrides, ``--section.key value``, merged into the tables of a TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcsgd.errors import UserError, shortened

_STRING_OR_WORD = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*"|'[^']*')|\b(?:true|false|nan|inf)\b(?!\s*=)""", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Typed:
    """The text after a command-line flag. What the text means depends on the type of the flag's key.

    A text that is `quoted` was a string in a table after a flag, so it means this string.
    """

    flag: str
    text: str
    quoted: bool = False

    def value(self) -> Any:
        """Return the TOML value of the text (also of ``True``, ``False``), or the text if it is none."""
        for spelling in () if self.quoted else (self.text, _lower_words(self.text)):
            try:
                (value,) = tomllib.loads(f"value = {spelling}").values()  # two lines are no value
            except (ValueError, RecursionError):
                continue
            return value
        return self.text

    def __str__(self) -> str:
        return f"{self.flag} {shortened(self.text)}"


def _lower_words(text: str) -> str:
    """Return `text` with the words true, false, nan and inf outside of strings in lower case."""
    return _STRING_OR_WORD.sub(lambda match: match[0] if match["string"] else match[0].lower(), text)


def overlay(table: dict[str, Any], words: Sequence[str]) -> None:
    """Merge ``--section.key value`` (or ``--section.key=value``) overrides into ``table``, in place.

    ``--section '{ key = value, … }'`` replaces the whole section; flags for keys of the section may follow.
    Raises `UserError` for words of another form, for a key inside a single value, and for a section that
    would replace a key of an earlier flag.
    """
    for typed in _typed_pairs(words):
        *sections, key = typed.flag.removeprefix("--").split(".")
        node = table
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise UserError(f"{typed}: {section!r} is a single value, it has no keys of its own")
        if isinstance(node.get(key), dict) and (before := first_typed(node[key])) is not None:
            raise UserError(
                f"{typed}: it is in place of all of that section, and so of {before}, which was typed before "
                f"it: type {typed.flag} first"
            )
        node[key] = typed if sections else opened(typed)


def opened(value: Any) -> Any:
    """Return the table that was typed, if `value` is one, or else `value`.

    Each string in the table is as if it had been typed after a flag of its own. So a relative path in it
    starts at the working directory, not at the job file.
    """
    whole = value.value() if isinstance(value, Typed) else None
    return _each(value.flag, whole) if isinstance(whole, dict) else value


def _each(flag: str, inner: Any) -> Any:
    if isinstance(inner, dict):
        return {key: _each(f"{flag}.{key}", value) for key, value in inner.items()}
    return Typed(flag, inner, quoted=True) if isinstance(inner, str) else inner


def _typed_pairs(words: Sequence[str]) -> Iterator[Typed]:
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            raise UserError(f"{word}: expected an override such as --training.epochs 3")
        flag, equals, text = word.partition("=")
        text = text if equals else next(rest, "--")
        if not equals and text.startswith("--"):
            raise UserError(f"{flag}: expected a value after it")
        yield Typed(flag, text)


def plain(value: Any) -> Any:
    """Return ``value`` with each text from the command line in it replaced by the TOML value of this text.

    ``value`` is a part of a job file's tables, into which the overrides on the command line were merged.
    """
    match value:
        case Typed():
            return value.value()
        case Mapping():
            return {key: plain(inner) for key, inner in value.items()}
        case _:
            return value


def first_typed(value: Any) -> Typed | None:
    """Return the first command-line override in ``value``, so that an error can name it.

    None if all of ``value`` is from the file.
    """
    match value:
        case Typed():
            return value
        case Mapping():
            return next(filter(None, map(first_typed, value.values())), None)
        case _:
            return None
