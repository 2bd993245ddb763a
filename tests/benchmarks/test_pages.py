"""Pages about one method and the page of the papers have the figures of the same results file."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from papers.artifact import RESULTS, Row

ROOT = Path(__file__).parents[2]
GOSSIP = {
    "DDP (gloo)": "DDP (gloo)",
    "`bsp`": "AR-SGD",
    "`d_psgd`": "D-PSGD",
    "`sgp`": "SGP",
    "`sgp(2)`": "2P-SGP",
    "`osgp(1)`": "1-OSGP",
    "`ad_psgd`": "AD-PSGD",
    "`async_sgd`": "async SGD",
}
ENSEMBLE = {
    "`bsp`": "sync SGD",
    "`async_sgd`": "async SGD",
    "`ensemble_sync`": "EnsembleSync",
    "`ensemble_sync` with natural gradient": "with natural gradient",
}


def rows_of(page: str, names: dict[str, str]) -> dict[str, list[str]]:
    """Return the cells of the rows that begin with `names`, by the names in the results file."""
    lines = [line.strip("| \n").split("|") for line in (ROOT / "docs" / page).read_text().splitlines()]
    rows = [[cell.strip() for cell in line] for line in lines]
    return {names[name]: cells for name, *cells in rows if name in names and cells}


def kept(result: str) -> list[Row]:
    return json.loads((RESULTS / result).read_text())["rows"]


def median_of(rows: list[Row], key: str, who: str, **given: Any) -> float:
    """Return the median of `key` in the one row of `who` that has it and the values `given`."""
    (found,) = (
        row[key]["median"]
        for row in rows
        if row["who"] == who and key in row and all((row[name] > 0) == value for name, value in given.items())
    )
    return found


def accuracies(rows: list[Row], who: str) -> list[Any]:
    return [row["accuracy"] for row in rows if row["who"] == who and "accuracy" in row]


def ours(paper: str, name: str) -> str:
    """Return our part of the line about a table or figure on the page of the papers."""
    small = import_module(f"papers.{paper}").ARTIFACTS[name].small
    beside = small.kept()
    assert beside.ours in (ROOT / "docs/papers.md").read_text()
    return beside.ours


@pytest.mark.parametrize("who", list(GOSSIP.values()))
def test_rates_of_gossip_are_those_of_the_file(who: str) -> None:
    rows, cells = kept("gossip.json"), rows_of("gossip.md", GOSSIP)[who]
    assert cells[:3] == [
        f"{median_of(rows, 'seconds_a_step', who, delay=False):.2f}",
        f"{median_of(rows, 'rate_over_AR', who, delay=False):.2f}",
        f"{median_of(rows, 'rate_over_AR', who, delay=True):.2f}",
    ]
    if found := accuracies(rows, who):
        assert cells[4] == f"{100 * mean(found):.2f} %"


@pytest.mark.parametrize("who", list(ENSEMBLE.values()))
def test_speeds_of_elastic_groups_are_those_of_the_file(who: str) -> None:
    rows, cells = kept("ensemble_speed.json"), rows_of("ensemble.md", ENSEMBLE)[who]
    speed = median_of(rows, "speed_over_sync", who)
    assert cells == [
        f"{1000 * median_of(rows, 'seconds_a_step', who):.1f}",
        "1" if who == "sync SGD" else f"{speed:.2f}",
        f"{100 * mean(found[-1] for found in accuracies(rows, who)):.1f}",
    ]


def test_the_page_of_the_papers_has_the_same_rates() -> None:
    cells = rows_of("gossip.md", GOSSIP)
    for name, among in {"Table 1": ("D-PSGD", "SGP"), "Table 2": ("2P-SGP", "SGP")}.items():
        for who in among:
            assert f"{who} {cells[who][1]}" in ours("sgp", name).split("; over")[0]
    for who in ("D-PSGD", "AD-PSGD", "SGP", "1-OSGP"):
        assert f"{who} {cells[who][1]}" in ours("sgp", "Table 3").split("; over")[0]


def test_the_page_of_the_papers_has_the_same_speed() -> None:
    speed = rows_of("ensemble.md", ENSEMBLE)["EnsembleSync"][1]
    assert ours("ensemblesync", "Figure 2").startswith(f"{speed} times as fast")
