"""The picture of a plan: equal methods share a line, and the ratio is to synchronous training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from hpcsgd.config.schema import load
from hpcsgd.cost import machine as machines
from hpcsgd.performance.planning import picture
from hpcsgd.performance.planning.candidates import options, ranks_from
from hpcsgd.performance.planning.estimate import Estimate
from hpcsgd.performance.planning.run import estimates
from hpcsgd.train.training_profile import profile_of
from performance.planning.plans import JOB, MACHINE


@pytest.fixture
def found(tmp_path: Path) -> list[Estimate]:
    job, machine = tmp_path / "job.toml", tmp_path / "machine.toml"
    job.write_text(JOB)
    machine.write_text(MACHINE)
    tried = options({"name": "hierarchical", "sync_every": 4}, ["bsp", "d_psgd", "hierarchical"], [4, 1000])
    subject = profile_of(load(job), samples=64_000)
    return estimates(subject, machines.load(machine), tried, ranks_from("4..16"), 8)[0]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    drawn: list[Figure] = []
    monkeypatch.setattr(picture, "save", lambda figure, target: drawn.append(figure))
    return drawn


def test_the_ratio_to_synchronous_training(found: list[Estimate], figures: list[Figure]) -> None:
    runs = [{"ranks": 8, "epoch_seconds": 100.0}]
    picture.draw(found, runs, Path("plan.png"))
    ratios = figures[0].axes[1]
    lines = {str(line.get_label()): np.asarray(line.get_ydata()) for line in ratios.lines}
    assert ratios.get_title("left") == "relative to bsp"
    assert next(y for label, y in lines.items() if "bsp" in label) == pytest.approx([1, 1, 1])
    texts = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert {"measured runs", "recommended method"} < set(texts)


def test_lines_that_coincide_are_one(
    found: list[Estimate], figures: list[Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "SAME", 1e9)
    picture.draw(found, [], Path("plan.png"))
    (line, best) = figures[0].axes[0].lines
    assert str(line.get_label()).replace("\n", " ").replace("\xa0", " ") == (
        "bsp, d_psgd, hierarchical sync_every=4, hierarchical sync_every=1000"
    )
    assert best.get_label() == "recommended method"


def test_without_synchronous_training_the_ratio_is_to_the_recommended_method(
    found: list[Estimate], figures: list[Figure]
) -> None:
    """It may lack estimates of some ranks."""
    others = [e for e in found if e.option.name != "bsp"]
    few = [e for e in others if e.option.name == "hierarchical" and e.N == 8]
    picture.draw(few[:1] + [e for e in others if e.option.name == "d_psgd"], [], Path("plan.png"))
    assert figures[0].axes[1].get_title("left") == f"relative to {few[0].option}"
