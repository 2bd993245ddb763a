"""The files that a run writes at its end; those of an elastic run cover all groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcsgd.elastic.event_log import NAME, EventLog, Loss
from hpcsgd.report.end_of_run import report
from hpcsgd.report.metrics import Metrics
from hpcsgd.report.records import of_run


def step(metrics: Metrics, number: int, samples: int, speed: float) -> None:
    numbers: dict[str, Any] = {"phase_seconds": {"compute": 1.0}, "phase_bytes": {}, "link_bytes": {}}
    metrics.step(
        step=number,
        epoch=1,
        loss=1 / number,
        lr=0.1,
        samples=samples,
        samples_per_s=speed,
        counts={},
        **numbers,
    )


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run whose group 0 evaluated until it died; group 1 made the most steps and evaluated afterwards."""
    for replica_group, steps, tested in ((0, (1, 2), 2), (1, (1, 2, 3), 3)):
        folder = tmp_path / "replica_groups" / str(replica_group)
        folder.mkdir(parents=True)
        with Metrics(folder / "metrics.jsonl") as metrics:
            for number in steps:
                step(metrics, number, 10 * (replica_group + 1), 40.0)
            metrics.evaluation(
                step=tested, epoch=1, loss=0.5, accuracy=0.1 * tested, distance=0.0, seconds=1.0
            )
    with EventLog(tmp_path / NAME) as events:
        events.generation(generation=1, members=[0, 1], newcomers=[], rounds=0)
        for rounds in (1, 2):
            who = {"members": [0, 1], "counted": [0, 1]}
            events.commit(generation=1, rounds=rounds, **who, t=1, epoch=0, fraction=0.5)
        events.lost(replica_group=0, why="", kind=Loss.DIED)
        events.generation(generation=2, members=[0, 1], newcomers=[0], rounds=2)
        events.lost(replica_group=0, why="", kind=Loss.LEFT)
    return tmp_path


def test_records_are_those_of_the_longest_with_all_evaluations(run_folder: Path) -> None:
    found = [(record["kind"], record["step"], record.get("samples")) for record in of_run(run_folder)]
    steps = [("step", 1, 20), ("step", 2, 20), ("eval", 2, None), ("step", 3, 20)]
    assert found == [*steps, ("eval", 3, None)]


def test_samples_are_those_of_all(run_folder: Path) -> None:
    told = report(run_folder)
    numbers = json.loads((run_folder / "summary.json").read_text())
    assert (numbers["samples"], numbers["seconds"], numbers["samples_per_s"]) == (80, 1.5, 80 / 1.5)
    assert numbers["best_accuracy"] == pytest.approx(0.3)
    assert (run_folder / "curves.png").exists()
    assert (numbers["rounds"], numbers["groups_lost"], numbers["groups_left"]) == (2, 1, 1)
    assert "\nelastic   2 rounds, lost 1 time, returned 1 time, left 1 time\n" in told
    assert told.endswith(f"\nwritten   {run_folder}")


def test_a_run_of_one_world_says_nothing_of_groups(tmp_path: Path) -> None:
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        step(metrics, 1, 10, 40.0)
    assert "replica_groups" not in report(tmp_path)
    assert "rounds" not in json.loads((tmp_path / "summary.json").read_text())
    assert (tmp_path / "curves.png").exists()


def test_of_groups_that_recorded_nothing_there_is_no_summary(tmp_path: Path) -> None:
    assert report(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
