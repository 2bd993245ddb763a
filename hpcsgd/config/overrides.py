"""Command-line overrides, ``--section.key value``, merged into the tables of a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcsgd.errors import UserError, shortened


@dataclass(frozen=True, slots=True)
class Typed:
    """The text after a command-line flag. What the text means depends on the type of the flag's key."""

    flag: str
    text: str

    def value(self) -> Any:
        """Return the TOML value of the text (also of ``True``, ``False``), or the text if it is none."""
        for spelling in (self.text, self.text.lower()):
            try:
                return tomllib.loads(f"value = {spelling}")["value"]
            except (ValueError, RecursionError):
                continue
        return self.text

    def __str__(self) -> str:
        return f"{self.flag} {shortened(self.text)}"


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
        whole = None if sections else typed.value()
        node[key] = _each(typed.flag, whole) if isinstance(whole, dict) else typed


def _each(flag: str, section: dict[str, Any]) -> dict[str, Any]:
    """Return `section` with each string as if it had been typed after a flag of its own.

    So a relative path in the section starts at the working directory, not at the job file.
    """
    return {
        key: Typed(f"{flag}.{key}", value) if isinstance(value, str) else value
        for key, value in section.items()
    }


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
