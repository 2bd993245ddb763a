"""What a file may contain besides single values: lists, tables of numbers, sections, and lists of these."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import tomli_w

from hpcsgd.config.kinds import Minimum
from hpcsgd.config.reader import as_table, read_section
from hpcsgd.errors import UserError

Number = Annotated[float, Minimum(0)]


@dataclass(frozen=True, kw_only=True)
class Inner:
    numbers: tuple[Number, ...] = ()
    counts: tuple[int, ...] = ()
    by_name: dict[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner | None = None
    each: tuple[Inner, ...] = ()


def read(text: str) -> Outer:
    return read_section(Outer, tomllib.loads(text), Path("f.toml"))


def test_lists_and_sections() -> None:
    text = "[inner]\nnumbers = [1, 2.5]\nby_name = { a = 1 }\n[[each]]\ncounts = [3]\n[[each]]\n"
    whole = Outer(inner=Inner(numbers=(1.0, 2.5), by_name={"a": 1.0}), each=(Inner(counts=(3,)), Inner()))
    assert read(text) == whole
    assert read(tomli_w.dumps(as_table(whole))) == whole


def test_what_is_left_out_is_not_there() -> None:
    assert read("") == Outer()
    assert as_table(Outer()) == {"each": []}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inner = 3", r"f.toml: inner = 3: expected a section of keys"),
        ("each = [3]", r"f.toml: each = \[3\]: expected sections \[\[each\]\]"),
        ("[each]", r"f.toml: \[each\]: expected sections \[\[each\]\]"),
        ("[inner]\nnumbers = [1, -1]", r"\[inner\] numbers = \[1, -1\]: expected a list of numbers ≥ 0"),
        ("[inner]\nnumbers = 1", r"\[inner\] numbers = 1: expected a list of numbers ≥ 0"),
        ("[inner]\ncounts = [1.5]", r"\[inner\] counts = \[1.5\]: expected a list of ints"),
        ("[inner]\nby_name = { a = -1 }", r"\[inner.by_name\]: expected a table of numbers ≥ 0"),
        ("[[each]]\n[[each]]\ncount = [1]", r"f.toml: \[each 2\] count = \[1\]: unknown key: did you mean"),
    ],
)
def test_what_does_not_fit_is_reported(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(text)
