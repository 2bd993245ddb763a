"""Tests of runs with a number of steps or samples: where they end, also after interruptions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.replica_groups import Absent
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError, UserError
from hpcsgd.train.length import Length, warn_of_few
from hpcsgd.train.training_setup import assemble
from train.interruptions import (
    Killed,
    assert_same_outcome,
    killed,
    outcome,
    train,
    without_pictures,
)
from train.launches import JOB, make_store

PER_EPOCH = 3  # steps of one group


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_store(folder / "small.h5")
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


def length_of(job_file: Path, *options: str, n: int = 1) -> Length:
    """Return the length, which must be the same on all of `n` ranks."""

    def one(world: Communicator) -> Length:
        config = load(job_file, options)
        return assemble(config, form(world, config.parallel.groups), job_file.name).length

    found = threads.run(n, one)
    assert len(set(found)) == 1
    return found[0]


@pytest.mark.parametrize(("samples", "warned"), [(15, True), (16, False)])
def test_more_samples_a_step_than_there_are(
    caplog: pytest.LogCaptureFixture, samples: int, warned: bool
) -> None:
    warn_of_few(samples, 16)
    assert ("[data] group_batch_size = 16: a group has 15 samples an epoch" in caplog.text) == warned


@pytest.mark.parametrize(
    ("samples", "groups", "epochs", "steps"),
    [(1, 1, 1, 1), (17, 1, 1, 2), (48, 1, 1, 3), (49, 1, 2, 4), (96, 2, 2, 4), (97, 2, 3, 5), (112, 2, 3, 5)],
)
def test_steps_of_so_many_samples(job_file: Path, samples: int, groups: int, epochs: int, steps: int) -> None:
    """48 samples in batches of 16 per group are 3 steps per epoch, or 2, the second with half a batch."""
    options = ("--training.samples", str(samples), "--parallel.groups", str(groups))
    found = length_of(job_file, *options, n=groups)
    assert (found.epochs, found.expected) == (epochs, steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "number", "step"), [("steps", 4, 4), ("samples", 64, 4), ("samples", 64, PER_EPOCH)]
)
def test_it_ends_in_the_middle_of_an_epoch(
    job_file: Path, tmp_path: Path, what: str, number: int, step: int
) -> None:
    """It is evaluated, saved and complete.

    A run that was stopped or killed at an epoch's end or after the last step ends the same way.
    """
    options = (f"--training.{what}", str(number), "--training.checkpoint_every_steps", "1")
    whole = tmp_path / "whole"
    train(job_file, whole, *options)
    records = outcome(whole)[1]
    assert [(r["step"], r["epoch"]) for r in records if r["kind"] == "eval"] == [(3, 1), (4, 2)]
    steps = [r for r in records if r["kind"] == "step"]
    assert sum(r["samples"] for r in steps) == 64
    assert [r["progress"] for r in steps] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3])
    for what_happens in ("stopped", "killed"):
        other = tmp_path / what_happens
        if what_happens == "stopped":
            assert train(job_file, other, *options, at=step) == ["enough"]
        else:
            with pytest.raises(Killed):
                train(job_file, other, *options, at=step, what=killed)
        for _ in range(2):  # the second time there is nothing left to do
            assert train(job_file, other, *options, resume=True) == [None]
            assert_same_outcome(other, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "first", "then"), [("steps", 4, 8), ("steps", 4, 5), ("samples", 64, 112)])
@pytest.mark.parametrize("per", ["epoch", "step"])
def test_a_longer_run_goes_on_within_the_epoch(
    job_file: Path, tmp_path: Path, what: str, first: int, then: int, per: str
) -> None:
    """It equals a run that had this length from the start, except for the evaluation at the first end."""
    schedule = (
        "--lr_schedule.name",
        "ExponentialLR",
        "--lr_schedule.arguments.gamma",
        "0.5",
        "--lr_schedule.interval",
        per,
    )
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    train(job_file, whole, f"--training.{what}", str(then), *schedule)
    train(job_file, longer, f"--training.{what}", str(first), *schedule)
    train(job_file, longer, f"--training.{what}", str(then), *schedule, resume=True)
    model, records = outcome(longer)
    expected, their_records = outcome(whole)
    assert all(torch.equal(value, expected[name]) for name, value in model.items())
    meant_as_last = [r for r in records if r["step"] == 4 and r["kind"] in ("epoch", "eval")]
    assert [r["epoch"] for r in meant_as_last] == [2, 2]
    assert [r for r in records if r not in meant_as_last] == their_records


def test_steps_count_on_other_ranks_too(job_file: Path, tmp_path: Path) -> None:
    """One group with 3 steps per epoch begins the run, and two groups with 2 end it."""
    options = ("--training.steps", "8", "--model.name", "train.small:steady")
    model = ("--model.arguments", "{ inputs = 36, norm = false }")
    train(job_file, tmp_path, *options, *model, at=4)
    train(job_file, tmp_path, *options, *model, "--parallel.groups", "2", n=2, resume=True)
    assert max(record["step"] for record in outcome(tmp_path)[1]) == 8


def test_not_both(job_file: Path) -> None:
    with pytest.raises(UserError, match="steps = 2 and samples = 3: give one of them, not both"):
        load(job_file, ["--training.steps", "2", "--training.samples", "3"])


def test_not_of_groups(job_file: Path) -> None:
    def one(world: Communicator) -> None:
        config = load(job_file, ["--training.steps", "2", "--method.name", "ensemble_sync"])
        assemble(config, replace(form(world), replica_groups=Absent(count=2)), job_file.name)

    with pytest.raises(JobError, match="go by epochs, not by steps"):
        threads.run(1, one)
