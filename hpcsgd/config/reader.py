"""Read TOML tables with overrides into checked dataclasses, and convert these back to tables.

A field whose type is a dataclass is a section. A field whose type is a tuple of dataclasses is a list of
sections, written as ``[[name]]``. Every mistake is one `UserError` line that names the file and key, or the
command-line flag, with what was given and what is allowed.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, Field, dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hpcsgd.config.kinds import convert, expectation, without_none
from hpcsgd.config.overrides import first_typed, opened
from hpcsgd.errors import KeyPath, UserError, in_file, located, near_miss, shortened
from hpcsgd.files.reading import read_text

T = TypeVar("T")
BESIDE = "beside"
KEYS_BESIDE = {BESIDE: True}  # metadata of the dict field that collects its section's remaining keys


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises `UserError` with line and column if it cannot be read."""
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also raised if a number has thousands of digits
        raise UserError(f"{path}: not valid TOML: {error}") from error
    except RecursionError:
        raise UserError(f"{path}: too many lists or tables inside each other") from None


def read_section(kind: type[T], table: Mapping[str, Any], file: Path, at: KeyPath = ()) -> T:
    """Return the dataclass `kind` with the values of `table`, the section of `file` at the path `at`.

    Raises `UserError` for a key or value that `kind` does not allow.
    """
    section = _Section(file, at, table)
    hints = get_type_hints(kind, include_extras=True)
    fields: tuple[Field[Any], ...] = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    beside = [field.name for field in fields if BESIDE in field.metadata]
    claimed = {field.name: field for field in fields if field.name not in beside}
    strangers = {key: value for key, value in table.items() if key not in claimed}
    if not beside:
        section.refuse(strangers, claimed)
    values = {
        key: section.read(hints[key], key) for key in claimed if key in table or _required(claimed[key])
    }
    values |= {key: section.of_any_kind(strangers) for key in beside}
    with section.origin():
        return kind(**values)


def as_table(section: Any) -> dict[str, Any]:
    """Return a table of TOML values from which `read_section` builds a dataclass equal to `section`."""
    table: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if BESIDE in field.metadata:
            table |= value
        elif value is not None:  # TOML has no null: None is the default of every field that allows it
            table[field.name] = _toml(value)
    return table


def _toml(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return as_table(value)
    if isinstance(value, tuple):
        return [_toml(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def section_kind(kind: Any) -> Any:
    """Return the dataclass that `kind` is, or that it joins with None in a union; None for other types."""
    if get_origin(kind) in (Union, UnionType):
        kind = without_none(kind)
    return kind if dataclasses.is_dataclass(kind) else None


def _listed_kind(kind: Any) -> Any:
    """Return the dataclass if `kind` is a tuple of dataclasses, otherwise None."""
    return section_kind(get_args(kind)[0]) if get_origin(kind) is tuple else None


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


@dataclass(frozen=True, slots=True)
class _Section:
    """One section of a TOML file with its overrides: reads the section's keys and names them in errors."""

    file: Path
    at: KeyPath
    table: Mapping[str, Any]

    def read(self, kind: Any, key: str) -> Any:
        if (section := section_kind(kind)) is not None:
            return self._subsection(section, key)
        if (section := _listed_kind(kind)) is not None:
            return self._subsections(section, key)
        if key not in self.table:
            message = f"{_name(self.at, key)} is missing: expected {expectation(kind)}"
            raise UserError(message, key=(*self.at, key), file=self.file)
        try:
            return convert(kind, self.table[key])
        except ValueError as error:
            raise UserError(f"{self._given(key)}: {error}", **self._about(key)) from None

    def of_any_kind(self, strangers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the keys in `strangers`, which may be any TOML values."""
        return {key: self.read(Any, key) for key in strangers}

    def _subsection(self, kind: Any, key: str) -> Any:
        inner = opened(self.table.get(key, {}))
        if not isinstance(inner, Mapping):
            raise UserError(f"{self._given(key)}: expected a section of keys", **self._about(key))
        return read_section(kind, inner, self.file, (*self.at, key))

    def _subsections(self, kind: Any, key: str) -> Any:
        inner = self.table.get(key, [])
        if not isinstance(inner, list) or not all(isinstance(each, Mapping) for each in inner):
            raise UserError(f"{self._given(key)}: expected sections [[{key}]]", **self._about(key))
        return tuple(read_section(kind, each, self.file, (*self.at, key, i)) for i, each in enumerate(inner))

    def refuse(self, strangers: Mapping[str, Any], known: Iterable[str]) -> None:
        """Raise `UserError` for the first of the unknown keys in `strangers`, if there are any."""
        for key, value in strangers.items():
            what = "section" if isinstance(value, Mapping) else "key"
            message = f"{self._given(key)}: unknown {what}: {near_miss(key, known)}"
            raise UserError(message, **self._about(key))

    @contextmanager
    def origin(self) -> Iterator[None]:
        """Begin the message of a `UserError` with the first flag that set the section, or with the file."""
        if typed := first_typed(self.table):
            with located(str(typed)):
                yield
        else:
            with in_file(self.file), located(_name(self.at), *self.at) if self.at else nullcontext():
                yield

    def _given(self, key: str) -> str:
        """Return, as text for an error, the flag or the line of the file that sets the key."""
        value = self.table[key]
        if typed := first_typed(value):
            return str(typed)
        if isinstance(value, Mapping):
            return _name((*self.at, key))
        return f"{_name(self.at, key)} = {shortened(json.dumps(value, default=str, ensure_ascii=False))}"

    def _about(self, key: str) -> dict[str, Any]:
        """Return the arguments `key` and `file` of a `UserError`; none if a flag set the key."""
        return {} if first_typed(self.table[key]) else {"key": (*self.at, key), "file": self.file}


def _name(section: KeyPath, key: str = "") -> str:
    """Return a section or key as text for errors: ``[data]``, ``[link 1]``, ``[data] path``, ``seed``."""
    words = (f" {part + 1}" if isinstance(part, int) else f".{part}" for part in section)
    named = f"[{''.join(words).removeprefix('.')}]" if section else ""
    return f"{named} {key}".strip()
