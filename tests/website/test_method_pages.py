"""Every method has a page, and its table of bytes agrees with the formulas of the docstring."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.image
import pytest

import method_pages
import pictures
from hpcsgd.cli.citing.uses import papers_of
from hpcsgd.config.schema import checked
from hpcsgd.methods import METHODS, Method
from hpcsgd.train.parts import make_method

ROOT = Path(__file__).parents[2]
CITED = re.compile(r"^@\w+\{(\w+),$", re.MULTILINE)
ROW = re.compile(r"^\| (\w+) \| (\w+) \| ([\w ]+) \| ([\d.e-]+) \|$", re.MULTILINE)


def shares(name: str) -> dict[tuple[str, str], float]:
    """Return the share of the model that is sent, by phase and by the ranks among which it is sent."""
    rows = ROW.findall(method_pages.sends(name, METHODS[name]))
    return {(phase, among): float(share) for phase, _, among, share in rows}


def test_every_method_has_a_page_in_the_list() -> None:
    made = method_pages.pages()
    assert made.keys() == {f"methods/{name}.md" for name in METHODS}
    assert all(f"](methods/{name}.md)" in method_pages.listed() for name in METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_page_has_the_lines_of_the_paper_and_the_entry(name: str) -> None:
    text = method_pages.page(name, METHODS[name])
    assert text.startswith(f"# {name}\n\n")
    assert f"\n[](){{#hpcsgd.{name}}}\n" in text
    assert shares(name)["grad_reduce", "a group"] > 0


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_changes_to_another_one_has_a_table_of_each(name: str) -> None:
    tables = method_pages.sends(name, METHODS[name]).split("\nThen:\n")
    assert len(tables) == 1 + (name in ("pier", "post_local", "switch"))
    if len(tables) == 2:
        first, then = (ROW.findall(table) for table in tables)
        phases = [{(phase, among) for phase, _, among, _ in rows} for rows in (first, then)]
        assert ("grad_reduce", "the groups") in phases[0] - phases[1]
        assert ("model_average", "the groups") in phases[1] - phases[0]


@pytest.mark.parametrize("name", METHODS)
def test_a_page_says_whom_to_cite(name: str) -> None:
    text = method_pages.page(name, METHODS[name])
    papers = papers_of(METHODS, name)
    assert CITED.findall(text) == list(papers)
    assert ("No paper describes this method" in text) == (not papers)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_small_picture_of_it_training(name: str) -> None:
    assert f"](../training/{name}.png)" in method_pages.page(name, METHODS[name])
    picture = ROOT / f"docs/training/{name}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 40_000


def test_no_picture_is_of_a_method_that_is_gone() -> None:
    assert {path.stem for path in (ROOT / "docs/training").iterdir()} == {*METHODS}


@pytest.mark.parametrize("name", METHODS)
def test_what_is_drawn_can_be_trained(name: str, tmp_path: Path) -> None:
    config = checked(pictures.job(name, tmp_path / "digits.h5"), tmp_path / "job.toml")
    assert isinstance(make_method(config.method, steps_per_epoch=20, total_steps=120), Method)
    assert (config.parallel.groups, config.method.name) == (4, name)


def test_a_picture_is_of_its_records(tmp_path: Path) -> None:
    steps = [{"kind": "step", "step": i, "loss": 1 / i} for i in range(1, 9)]
    tested = [{"kind": "eval", "step": i, "accuracy": i / 10, "distance": 0.5} for i in (4, 8)]
    for name, records in (("a", [*steps, *tested]), ("b", steps)):
        pictures.draw(name, records, steps, tmp_path / "new" / f"{name}.png")
    a, b = (matplotlib.image.imread(tmp_path / "new" / f"{name}.png") for name in "ab")
    width = a.shape[1] // 3
    assert a.shape == b.shape
    assert (a[:, :width] == b[:, :width]).mean() > 0.95
    assert (a[:, width:] != b[:, width:]).any()


def test_bytes_are_those_of_the_formulas() -> None:
    in_group, across = 3 / 4, 2 * 3 / 4 / 4  # (K−1)/K for each of the two directions; 2·(P−1)/P·M/K
    expected = {("grad_reduce", "a group"): in_group, ("param_gather", "a group"): in_group}
    assert shares("bsp") == pytest.approx(expected | {("grad_reduce", "the groups"): across}, rel=1e-2)
    for name in ("hierarchical", "diloco"):
        assert shares(name) == pytest.approx(
            expected | {("model_average", "the groups"): across / 8}, rel=1e-2
        )
    assert shares("sgp") == pytest.approx(expected | {("model_average", "the groups"): 1 / 4}, rel=1e-2)


def test_pages_that_say_more_are_there_and_of_methods() -> None:
    more = method_pages.more()
    assert {"diloco.md", "gossip.md", "late.md"} <= more.keys()
    for page, names in more.items():
        text = method_pages.MORE.sub("", (ROOT / "docs" / page).read_text().lower())
        assert all(name in METHODS and name in text for name in names), page


def test_the_example_is_shown_as_it_is_typed() -> None:
    assert method_pages.called("sgp", METHODS["sgp"]) == "sgp()"
    told = method_pages.called("switch", METHODS["switch"])
    assert told == "switch(first=bsp(), then=hierarchical(sync_every=8), at=1000)"
