"""Wherever a run is interrupted, it ends as if it had not been: every step is tried, in one process."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcsgd.data import convert
from hpcsgd.errors import JobError
from hpcsgd.topology import form
from hpcsgd.training.assembly import Assembly, assemble
from hpcsgd.training.config import load
from hpcsgd.transport import Transport, threads

a_run = importlib.import_module("hpcsgd.training.run")  # the package has a function of that name
LAST = 8

JOB = """
data = { store = "digits.h5", batch_size = 400, transform = "training.small:noisy" }
model = { build = "training.small:chancy" }
optimizer = { build = "AdamW", lr = 0.01 }
schedule = { warmup_epochs = 1.5, build = "MultiStepLR", arguments = { milestones = [3, 6] }, per = "step" }
method = { name = "hierarchical", every = 3 }
training = { epochs = 2, log_every = 1 }
"""
ON_4_RANKS = (
    *("--job.groups", "2", "--data.batch_size", "200", "--data.transform", "crop_and_flip"),
    *("--model.build", "training.small:steady"),
)


class Killed(Exception):
    """By somebody else."""


def stopped(_: int) -> str:
    return "enough"


def killed(_: int) -> str:
    raise Killed


class Interruption:
    """In place of `Stopping`: something happens after one step."""

    def __init__(self, parts: Assembly, step: int, what: Callable[[int], str]) -> None:
        self._parts, self._step, self._what = parts, step, what

    def now(self) -> str | None:
        t = self._parts.optimizer.t
        return self._what(t) if t == self._step else None


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("job")
    convert("digits", None, folder / "digits.h5")
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a_run, "_report", lambda _: None)


def train(
    job_file: Path,
    folder: Path,
    *options: str,
    n: int = 1,
    at: int = 0,
    what: Callable[[int], str] = stopped,
    resume: bool = False,
) -> list[str | None]:
    """As the command does it, on `n` threads."""

    def one(world: Transport) -> str | None:
        config = load(job_file, [*options, "--run.folder", str(folder)])
        parts = assemble(config, form(world, config.job.groups), job_file.name)
        interruption: Any = Interruption(parts, at, what)
        with ExitStack() as files:
            return a_run._train(config, parts, interruption, world.apart(), resume, files)

    folder.mkdir(exist_ok=True)
    return threads.run(n, one)


def outcome(folder: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines.sort(key=lambda r: (r["step"], r["kind"]))  # a step's record comes once all ranks have made it
    timed = {"seconds", "samples_per_s"}
    records = [{k: v for k, v in r.items() if k not in timed and not k.endswith("_seconds")} for r in lines]
    return torch.load(folder / "model.pt"), records


def assert_same_outcome(one: Path, other: Path) -> None:
    (model, records), (their_model, their_records) = outcome(one), outcome(other)
    assert records == their_records
    assert model.keys() == their_model.keys()
    assert all(torch.equal(value, their_model[name]) for name, value in model.items())


@pytest.fixture(scope="module")
def whole(job_file: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a_run, "_report", lambda _: None)
        train(job_file, job_file.parent / "whole")
    return job_file.parent / "whole"


@pytest.mark.parametrize("step", range(1, LAST + 1))
def test_stopped_after_any_step(job_file: Path, whole: Path, tmp_path: Path, step: int) -> None:
    assert train(job_file, tmp_path, at=step) == ["enough"]
    assert not (tmp_path / "model.pt").exists()
    assert train(job_file, tmp_path, resume=True) == [None]
    assert_same_outcome(tmp_path, whole)


@pytest.mark.parametrize("every", [1, 3, 4, None])
@pytest.mark.parametrize("step", range(1, LAST + 1))
def test_killed_after_any_step(
    job_file: Path, whole: Path, tmp_path: Path, step: int, every: int | None
) -> None:
    options = [] if every is None else ["--training.checkpoint_every", str(every)]
    with pytest.raises(Killed):
        train(job_file, tmp_path, *options, at=step, what=killed)
    assert train(job_file, tmp_path, *options, resume=True) == [None]
    assert_same_outcome(tmp_path, whole)


@pytest.mark.parametrize("every", ["1", "4"])
def test_killed_in_an_evaluation(
    job_file: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: str
) -> None:
    """What was told of the epoch before is not told twice."""
    options = ("--training.checkpoint_every", every)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("hpcsgd.training.loop.evaluate", killed)
        train(job_file, tmp_path, *options)
    train(job_file, tmp_path, *options, resume=True)
    assert_same_outcome(tmp_path, whole)


def test_stopped_after_every_step(job_file: Path, whole: Path, tmp_path: Path) -> None:
    for step in range(1, LAST + 1):
        assert train(job_file, tmp_path, at=step, resume=True) == ["enough"]
    for _ in range(2):  # the second time there is nothing left to do
        assert train(job_file, tmp_path, resume=True) == [None]
        assert_same_outcome(tmp_path, whole)


def test_four_ranks(job_file: Path, tmp_path: Path) -> None:
    runs = {step: tmp_path / f"stopped after {step}" for step in (0, 2, 4, 7)}
    for step, folder in runs.items():
        train(job_file, folder, *ON_4_RANKS, n=4, at=step)
        if step:
            train(job_file, folder, *ON_4_RANKS, n=4, resume=True)
        assert_same_outcome(folder, runs[0])


def test_the_interruption_matters(job_file: Path, whole: Path, tmp_path: Path) -> None:
    """So that the others can fail: from another seed all is different."""
    train(job_file, tmp_path, "--seed", "2")
    with pytest.raises(AssertionError):
        assert_same_outcome(tmp_path, whole)


SCHEDULES: dict[str, str] = {
    "MultiStepLR": "{ milestones = [2, 4, 4, 7] }",
    "CosineAnnealingLR": "{ T_max = 6 }",
    "OneCycleLR": "{ max_lr = 0.1, total_steps = 9 }",
    "CyclicLR": "{ base_lr = 0.01, max_lr = 0.1, step_size_up = 3, cycle_momentum = false }",
    "CosineAnnealingWarmRestarts": "{ T_0 = 3 }",
    "training.small:sequence": "{}",
}


@pytest.mark.parametrize(
    ("schedule", "per"), [*((name, "step") for name in SCHEDULES), ("CosineAnnealingLR", "epoch")]
)
def test_the_learning_rate_goes_on(job_file: Path, tmp_path: Path, schedule: str, per: str) -> None:
    arguments = ("--schedule.arguments", SCHEDULES[schedule])
    options = ("--schedule.build", schedule, "--schedule.per", per, *arguments)
    train(job_file, tmp_path / "whole", *options)
    for step in (3, 5):
        train(job_file, tmp_path / "parts", *options, at=step, resume=True)
    train(job_file, tmp_path / "parts", *options, resume=True)
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")
    rates = [record["lr"] for record in outcome(tmp_path / "whole")[1] if record["kind"] == "step"]
    assert len(set(rates)) > 1


def test_another_schedule_is_refused(job_file: Path, tmp_path: Path) -> None:
    train(job_file, tmp_path, at=3)
    options = ("--schedule.build", "CosineAnnealingLR", "--schedule.arguments", "{ T_max = 6 }")
    with pytest.raises(JobError, match="MultiStepLR in the checkpoint, CosineAnnealingLR in this job"):
        train(job_file, tmp_path, *options, resume=True)


def test_a_schedule_by_results_is_refused(job_file: Path, tmp_path: Path) -> None:
    options = ("--schedule.build", "ReduceLROnPlateau", "--schedule.arguments", "{}")
    with pytest.raises(JobError, match="ReduceLROnPlateau"):
        train(job_file, tmp_path, *options)
