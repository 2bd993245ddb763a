"""Tests that all metrics of a method are in the metrics of a run and in its plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from torch import Tensor

from hpcsgd.core.averager import Averager, Traits
from hpcsgd.core.method import Method
from hpcsgd.core.step import StepContext
from hpcsgd.parts.averagers import Mean, WithDistance
from hpcsgd.parts.grad_reduces import AllToAll
from hpcsgd.parts.schedules import Every
from hpcsgd.report.curves import plot_curves
from hpcsgd.report.summary import of_kind
from hpcsgd.report.totals import Totals
from train.launches import JOB, make_store
from train.test_loop import TEST, TRAIN, train


@dataclass(frozen=True)
class Tasted:
    """`inner` with three metrics: one in every step, one in every other step, and one for a histogram."""

    inner: Averager

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, histogram_names=("spoons",))

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        s.metrics["flavour"] = 1 / s.t
        s.metrics["spoons"] = s.t % 3
        if s.t % 2:
            s.metrics["salt"] = 2

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterable[Tensor]:
        return self.inner.average(vectors, s)


def tasted(sync_every: int) -> Method:
    return Method(grad_reduce=AllToAll(), schedule=Every(sync_every), averager=Tasted(WithDistance(Mean())))


def plain(sync_every: int) -> Method:
    return Method(grad_reduce=AllToAll(), schedule=Every(sync_every), averager=WithDistance(Mean()))


def test_notes_that_nobody_has_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_store(tmp_path / "small.h5", TRAIN, TEST)
    (tmp_path / "job.toml").write_text(JOB.replace('"hierarchical"', f'"{__name__}:tasted"'))
    words = "--parallel.groups 2 --data.group_batch_size 4 --training.epochs 1 --training.log_every 4"
    records = train(tmp_path / "job.toml", tmp_path / "run", words, n=2)
    expected = [{"flavour": 1 / t, **({"salt": 2.0} if t % 2 else {})} for t in range(1, 7)]
    assert of_kind(records, "method") == [
        {"kind": "method", "step": t, **metrics} for t, metrics in enumerate(expected, start=1)
    ]
    assert Totals.of(records).counts == {"spoons": {0: 4, 1: 4, 2: 4}}, "6 steps of 2 ranks"

    drawn: dict[str, Any] = {}

    def look(figure: Figure, *_: object, **__: object) -> None:
        for axes in figure.axes:
            drawn[axes.get_title(loc="left")] = axes.lines[0].get_data() if axes.lines else None

    monkeypatch.setattr(Figure, "savefig", lambda figure, part, **_: (look(figure), part.touch()))
    plot_curves(records, tmp_path / "curves.png")
    steps, flavour = drawn["flavour"]
    assert (list(steps), list(flavour)) == ([1, 2, 3, 4, 5, 6], [1 / t for t in range(1, 7)])
    assert list(drawn["salt"][0]) == [1, 3, 5]
    assert "how often which number" in drawn


def test_a_method_without_notes_leaves_no_record(tmp_path: Path) -> None:
    """Neither a synchronization's distance nor a plain gradient reduction is a metric of the method."""
    make_store(tmp_path / "small.h5", TRAIN, TEST)
    for name in (f"{__name__}:plain", "bsp"):
        (tmp_path / "job.toml").write_text(JOB.replace('"hierarchical"', f'"{name}"'))
        job = (tmp_path / "job.toml").read_text()
        (tmp_path / "job.toml").write_text(job.replace("sync_every = 2\n", "") if name == "bsp" else job)
        words = "--parallel.groups 2 --data.group_batch_size 4 --training.epochs 1"
        records = train(tmp_path / "job.toml", tmp_path / name.rpartition(":")[2], words, n=2)
        assert {record["kind"] for record in records} <= {"sync", "step", "epoch", "eval"}


@pytest.mark.parametrize(
    ("method", "names"), [('"ssp"\nmax_staleness = 1', {"staleness", "ahead"}), ('"ad_psgd"', {"staleness"})]
)
def test_what_is_counted(tmp_path: Path, method: str, names: set[str]) -> None:
    make_store(tmp_path / "small.h5", TRAIN, TEST)
    (tmp_path / "job.toml").write_text(JOB.replace('"hierarchical"\nsync_every = 2', method))
    words = "--parallel.groups 2 --data.group_batch_size 4 --training.epochs 1"
    records = train(tmp_path / "job.toml", tmp_path / "run", words, n=2)
    assert {
        name: sum(counts.values()) for name, counts in Totals.of(records).counts.items()
    } == dict.fromkeys(names, 6 * 2)
    assert not of_kind(records, "method")
