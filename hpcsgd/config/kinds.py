"""Check values against the annotations of dataclass fields, and describe annotations in errors.

Supported are ``int``, ``float``, ``str``, ``bool``, ``Path``, ``Literal``, ``dict[str, Any]``, ``dict`` and
``tuple`` of one of the first three, unions of these, any of these ``| None``, and ``Annotated`` with the
bounds below. Nothing is rounded or coerced: 3.5 is no int, true is no number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from hpcsgd.config.overrides import Typed, plain
from hpcsgd.errors import near_miss


@dataclass(frozen=True, slots=True)
class Minimum:
    """A bound for ``Annotated``: the value is ``low`` or more."""

    low: float

    def holds(self, value: float) -> bool:
        return value >= self.low

    def __str__(self) -> str:
        return f"≥ {self.low}"


@dataclass(frozen=True, slots=True)
class Above:
    """A bound for ``Annotated``: the value is more than ``low``."""

    low: float

    def holds(self, value: float) -> bool:
        return value > self.low

    def __str__(self) -> str:
        return f"> {self.low}"


LARGEST = 2**63 - 1
"""The largest whole number that a file or a flag can give; the smallest is its negative."""
NAMES = {int: "int", float: "number", bool: "true or false", str: "str", Path: "path"}


def expectation(kind: Any) -> str:
    """Return the annotation as text for an error line: ``int ≥ 1``, ``one of linear, none, root``."""
    if kind in NAMES:
        return NAMES[kind]
    if kind is Any:
        return "a value"
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner, *bounds = arguments
        return " ".join([expectation(inner), *map(str, bounds)])
    if origin is Literal:
        return f"one of {', '.join(sorted(arguments))}"
    if origin is dict:
        return "a table of keys" if arguments[1] is Any else f"a table of {_several(arguments[1])}"
    if origin is tuple:
        return f"a list of {_several(arguments[0])}"
    return expectation(without_none(kind))


def _several(kind: Any) -> str:
    """Return the annotation as text in the plural, such as ``numbers ≥ 0``."""
    if len(kinds := _members(kind)) > 1:
        return " or ".join(map(_several, kinds))
    if get_origin(kind) is dict:
        return "tables"
    name, *bounds = ("string" if kind is str else expectation(kind)).split(" ", 1)
    return " ".join([f"{name}s", *bounds])


def convert(kind: Any, value: Any) -> Any:
    """Return ``value``, from TOML or a flag, as ``kind``. Raises `ValueError` that says what is expected."""
    try:
        return _fit(kind, value)
    except (ValueError, OverflowError):
        text = _text(value)
        if not _in_range(plain(value)):
            raise ValueError(f"expected {expectation(kind)}, whole numbers up to 2^63 − 1") from None
        if _has_nan(plain(value)):
            raise ValueError(f"expected {expectation(kind)}, and no nan") from None
        if get_origin(kind) is Literal and isinstance(text, str):
            raise ValueError(near_miss(text, get_args(kind))) from None
        raise ValueError(f"expected {expectation(kind)}") from None


def _in_range(value: Any) -> bool:
    """Return True if all whole numbers in `value` are within ±`LARGEST`, so that other programs read them."""
    if isinstance(value, int):
        return -LARGEST <= value <= LARGEST
    if isinstance(value, dict):
        return all(map(_in_range, cast("dict[Any, Any]", value).values()))
    return not isinstance(value, list) or all(map(_in_range, cast("list[Any]", value)))


def _has_nan(value: Any) -> bool:
    """Return True if a number in `value` is nan, with which a training would go wrong from the first step."""
    if isinstance(value, dict):
        return any(map(_has_nan, cast("dict[Any, Any]", value).values()))
    if isinstance(value, list):
        return any(map(_has_nan, cast("list[Any]", value)))
    return isinstance(value, float) and math.isnan(value)


def _fit(kind: Any, value: Any) -> Any:
    if kind in (str, Path):
        return kind(_checked(_text(value), str))
    if not _in_range(plain(value)) or _has_nan(plain(value)):
        raise ValueError
    if kind is Any:
        return plain(value)
    if kind is int:
        return _checked(plain(value), int)
    if kind is float:
        return _finite(_checked(plain(value), int, float))
    if kind is bool:
        return _checked(plain(value), bool)
    origin = get_origin(kind)
    if origin is Annotated:
        return _bounded(*get_args(kind), value=value)
    if origin is Literal:
        return _member(get_args(kind), _text(value))
    if origin is dict:
        table, (_, inner) = _checked(plain(value), dict), get_args(kind)
        return {key: _fit(inner, item) for key, item in table.items()}
    if origin is tuple:
        return tuple(_fit(get_args(kind)[0], item) for item in _checked(plain(value), list))
    if isinstance(value, Typed) and value.text == "none" and not value.quoted:
        return None
    if len(kinds := _members(kind)) > 1:
        return _first_fit(kinds, value)
    return _fit(without_none(kind), value)


def _first_fit(kinds: Sequence[Any], value: Any) -> Any:
    for kind in kinds:
        with suppress(ValueError):
            return _fit(kind, value)
    raise ValueError


def _checked(value: Any, *types: type) -> Any:
    if type(value) not in types:  # not isinstance: a bool is no int
        raise ValueError
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError
    return float(value)


def _bounded(inner: Any, *bounds: Minimum | Above, value: Any) -> Any:
    fitting = _fit(inner, value)
    if not all(bound.holds(fitting) for bound in bounds):
        raise ValueError
    return fitting


def _member(choices: tuple[Any, ...], value: Any) -> Any:
    if value not in choices:
        raise ValueError
    return value


def _text(value: Any) -> Any:
    return value.text if isinstance(value, Typed) else value


def without_none(kind: Any) -> Any:
    """Return the type in a union of one type with None, such as ``int`` of ``int | None``."""
    (inner,) = _members(kind)
    return inner


def alternatives_to_none(kind: Any) -> list[Any]:
    """Return the types that a union allows except None: ``int`` and ``str`` of ``int | str | None``."""
    return _members(kind) or [kind]


def _members(kind: Any) -> list[Any]:
    """Return the members of a union, except None."""
    if get_origin(kind) not in (Union, UnionType):
        return []
    return [member for member in get_args(kind) if member is not NoneType]
