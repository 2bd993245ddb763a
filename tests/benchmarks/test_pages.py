"""The page of the papers has the rates of the pages that tests/website/test_measured.py checks."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from website.measured import gossip
from website.measured.results import row

PAPERS = (Path(__file__).parents[2] / "benchmarks/papers/README.md").read_text()


def ours(paper: str, name: str) -> str:
    """Return our part of the line about a table or figure on the page of the papers."""
    small = import_module(f"papers.{paper}").ARTIFACTS[name].small
    beside = small.kept()
    assert beside.ours in PAPERS
    return beside.ours


def rate(who: str) -> str:
    """Return the rate over `bsp` as docs/gossip.md has it."""
    _, quiet, *_ = gossip.cells(who)
    return f"{who} {quiet}"


def test_the_page_of_the_papers_has_the_same_rates() -> None:
    for name, among in {"Table 1": ("D-PSGD", "SGP"), "Table 2": ("2P-SGP", "SGP")}.items():
        for who in among:
            assert rate(who) in ours("sgp", name).split("; over")[0]
    for who in ("D-PSGD", "AD-PSGD", "SGP", "1-OSGP"):
        assert rate(who) in ours("sgp", "Table 3").split("; over")[0]


def test_the_page_of_the_papers_has_the_same_speed() -> None:
    speed = row("ensemble_speed", who="EnsembleSync", rounds=6)["speed_over_sync"]["median"]
    assert ours("ensemblesync", "Figure 2").startswith(f"{speed:.2f} times as fast")
