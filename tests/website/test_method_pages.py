"""Every method has a page, whose bytes are those of its docstring's formulas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import method_pages
from hpcsgd.methods import METHODS

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\w+) \| (\w+) \| ([\w ]+) \| ([\d.e-]+) \|$", re.MULTILINE)


def shares(name: str) -> dict[tuple[str, str], float]:
    """What is sent by phase and among whom."""
    rows = ROW.findall(method_pages.sends(name, METHODS[name]))
    return {(phase, among): float(share) for phase, _, among, share in rows}


def test_every_method_has_a_page_in_the_list() -> None:
    made = method_pages.pages()
    assert made.keys() == {f"methods/{name}.md" for name in METHODS}
    assert all(f"]({name}.md)" in method_pages.listed() for name in METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_page_has_the_lines_of_the_paper_and_the_entry(name: str) -> None:
    text = method_pages.page(name, METHODS[name])
    assert text.startswith(f"# {name}\n\n")
    assert f"\n[](){{#hpcsgd.{name}}}\n" in text
    assert shares(name)["gradients", "a group"] > 0


def test_bytes_are_those_of_the_formulas() -> None:
    in_group, across = 3 / 4, 2 * 3 / 4 / 4  # (K−1)/K there and back again; 2·(P−1)/P·M/K
    expected = {("gradients", "a group"): in_group, ("parameters", "a group"): in_group}
    assert shares("bsp") == pytest.approx(expected | {("gradients", "the groups"): across}, rel=1e-2)
    for name in ("hierarchical", "diloco"):
        assert shares(name) == pytest.approx(expected | {("average", "the groups"): across / 8}, rel=1e-2)
    assert shares("sgp") == pytest.approx(expected | {("average", "the groups"): 1 / 4}, rel=1e-2)


def test_pages_that_say_more_are_there_and_of_methods() -> None:
    for page, names in method_pages.MORE.items():
        text = (ROOT / "docs" / page).read_text().lower()
        assert all(name in METHODS and name in text for name in names), page


def test_the_example_is_told_as_it_is_typed() -> None:
    assert method_pages.called("sgp", METHODS["sgp"]) == "sgp()"
    told = method_pages.called("switch", METHODS["switch"])
    assert told == "switch(first=bsp(), then=hierarchical(every=8), at=1000)"
