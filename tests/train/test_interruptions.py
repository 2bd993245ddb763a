"""Tests that an interrupted run ends as if it had not been interrupted, at every step, in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpcsgd.data import convert
from hpcsgd.errors import JobError
from train.interruptions import (
    Killed,
    assert_same_outcome,
    killed,
    outcome,
    train,
    without_pictures,
)

LAST = 8

JOB = """
data = { path = "digits.h5", group_batch_size = 400, transform = "train.small:noisy" }
model = { name = "train.small:chancy" }
optimizer = { name = "AdamW", lr = 0.01 }
lr_schedule = { warmup_epochs = 1.5, name = "MultiStepLR", arguments = { milestones = [3, 6] }, \
interval = "step" }
method = { name = "hierarchical", sync_every = 3 }
training = { epochs = 2, log_every = 1 }
"""
ON_4_RANKS = (
    *("--parallel.groups", "2", "--data.group_batch_size", "200", "--data.transform", "crop_and_flip"),
    *("--model.name", "train.small:steady"),
)


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("job")
    convert("digits", None, folder / "digits.h5")
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


@pytest.fixture(scope="module")
def whole(job_file: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        train(job_file, job_file.parent / "whole")
    return job_file.parent / "whole"


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, LAST + 1))
def test_stopped_after_any_step(job_file: Path, whole: Path, tmp_path: Path, step: int) -> None:
    assert train(job_file, tmp_path, at=step) == ["enough"]
    assert not (tmp_path / "model.pt").exists()
    assert train(job_file, tmp_path, resume=True) == [None]
    assert_same_outcome(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3, 4, None])
@pytest.mark.parametrize("step", range(1, LAST + 1))
def test_killed_after_any_step(
    job_file: Path, whole: Path, tmp_path: Path, step: int, every: int | None
) -> None:
    options = [] if every is None else ["--training.checkpoint_every_steps", str(every)]
    with pytest.raises(Killed):
        train(job_file, tmp_path, *options, at=step, what=killed)
    assert train(job_file, tmp_path, *options, resume=True) == [None]
    assert_same_outcome(tmp_path, whole)


@pytest.mark.parametrize("every", ["1", "4"])
def test_killed_in_an_evaluation(
    job_file: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: str
) -> None:
    """Records of the epoch before are not written twice."""
    options = ("--training.checkpoint_every_steps", every)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("hpcsgd.train.loop.evaluate", killed)
        train(job_file, tmp_path, *options)
    train(job_file, tmp_path, *options, resume=True)
    assert_same_outcome(tmp_path, whole)


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize(("check", "epochs", "step"), [(1, [], 4), (2, [1], 4), (3, [1], 8)])
def test_stopped_around_an_evaluation(
    job_file: Path, whole: Path, tmp_path: Path, check: int, epochs: list[int], step: int, every: int | None
) -> None:
    """The epoch is saved, and evaluated once: by the run that goes on, if this one had to stop before."""
    options = [] if every is None else ["--training.checkpoint_every_steps", str(every)]
    assert train(job_file, tmp_path, *options, check=check) == ["enough"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records if record["kind"] == "eval"] == epochs
    assert saved_steps(tmp_path)[-1] == f"step-0000000{step}"
    assert not (tmp_path / "model.pt").exists()
    assert train(job_file, tmp_path, *options, resume=True) == [None]
    assert_same_outcome(tmp_path, whole)


def test_stopped_again_before_the_evaluation_is_made_up_for(
    job_file: Path, whole: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        assert train(job_file, tmp_path, check=1, resume=True) == ["enough"]
    assert train(job_file, tmp_path, check=1, at=5, resume=True) == ["enough"]
    assert train(job_file, tmp_path, resume=True) == [None]
    assert_same_outcome(tmp_path, whole)


def test_killed_in_an_evaluation_the_epoch_is_not_lost(
    job_file: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a job whose evaluation takes longer than its notice would train this epoch again for ever."""
    for step in (4, 8):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr("hpcsgd.train.loop.evaluate", killed)
            train(job_file, tmp_path, resume=True)
        assert saved_steps(tmp_path)[-1] == f"step-0000000{step}"
        if step == 4:
            assert train(job_file, tmp_path, at=5, resume=True) == ["enough"]
    assert train(job_file, tmp_path, resume=True) == [None]
    assert_same_outcome(tmp_path, whole)


@pytest.mark.slow
def test_stopped_after_every_step(job_file: Path, whole: Path, tmp_path: Path) -> None:
    for step in range(1, LAST + 1):
        assert train(job_file, tmp_path, at=step, resume=True) == ["enough"]
    for _ in range(2):  # the second time there is nothing left to do
        assert train(job_file, tmp_path, resume=True) == [None]
        assert_same_outcome(tmp_path, whole)


@pytest.mark.slow
def test_four_ranks(job_file: Path, tmp_path: Path) -> None:
    runs = {step: tmp_path / f"stopped after {step}" for step in (0, 2, 4, 7)}
    for step, folder in runs.items():
        train(job_file, folder, *ON_4_RANKS, n=4, at=step)
        if step:
            train(job_file, folder, *ON_4_RANKS, n=4, resume=True)
        assert_same_outcome(folder, runs[0])


LATE: dict[str, str] = {
    "delayed": '{ name = "delayed", sync_delay = 2, method = { name = "diloco", sync_every = 3 } }',
    "streaming": '{ name = "streaming", num_fragments = 2, sync_delay = 2, '
    'method = { name = "diloco", sync_every = 3 } }',
}


@pytest.mark.slow
@pytest.mark.parametrize("method", LATE)
def test_stopped_while_a_synchronization_is_under_way(job_file: Path, tmp_path: Path, method: str) -> None:
    """A pending synchronization is kept.

    It began after step 3 or, for the second fragment, after steps 2, 5 and 8.
    """
    late = tmp_path / "job.toml"
    store = f'path = "{job_file.parent / "digits.h5"}"'
    plain = 'method = { name = "hierarchical", sync_every = 3 }'
    late.write_text(JOB.replace('path = "digits.h5"', store).replace(plain, f"method = {LATE[method]}"))
    train(late, tmp_path / "whole", *ON_4_RANKS, n=4)
    train(late, tmp_path / "parts", *ON_4_RANKS, n=4, at=4)
    train(late, tmp_path / "parts", *ON_4_RANKS, n=4, resume=True)
    (model, records), (parts, of_parts) = outcome(tmp_path / "whole"), outcome(tmp_path / "parts")
    for record in (*records, *of_parts):
        record.pop("phase_bytes", None)  # these depend on when the communication thread sends
    assert records == of_parts
    assert all(torch.equal(value, parts[name]) for name, value in model.items())


def test_the_interruption_matters(job_file: Path, whole: Path, tmp_path: Path) -> None:
    """A run from another seed differs, so the other tests can fail."""
    train(job_file, tmp_path, "--seed", "2")
    with pytest.raises(AssertionError):
        assert_same_outcome(tmp_path, whole)


SCHEDULES: dict[str, str] = {
    "MultiStepLR": "{ milestones = [2, 4, 4, 7] }",
    "CosineAnnealingLR": "{ T_max = 6 }",
    "OneCycleLR": "{ max_lr = 0.1, total_steps = 9 }",
    "CyclicLR": "{ base_lr = 0.01, max_lr = 0.1, step_size_up = 3, cycle_momentum = false }",
    "CosineAnnealingWarmRestarts": "{ T_0 = 3 }",
    "train.small:sequence": "{}",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "per"), [*((name, "step") for name in SCHEDULES), ("CosineAnnealingLR", "epoch")]
)
def test_the_learning_rate_goes_on(job_file: Path, tmp_path: Path, schedule: str, per: str) -> None:
    arguments = ("--lr_schedule.arguments", SCHEDULES[schedule])
    options = ("--lr_schedule.name", schedule, "--lr_schedule.interval", per, *arguments)
    train(job_file, tmp_path / "whole", *options)
    for step in (3, 5):
        train(job_file, tmp_path / "parts", *options, at=step, resume=True)
    train(job_file, tmp_path / "parts", *options, resume=True)
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")
    rates = [record["lr"] for record in outcome(tmp_path / "whole")[1] if record["kind"] == "step"]
    assert len(set(rates)) > 1


def test_another_schedule_is_refused(job_file: Path, tmp_path: Path) -> None:
    train(job_file, tmp_path, at=3)
    options = ("--lr_schedule.name", "CosineAnnealingLR", "--lr_schedule.arguments", "{ T_max = 6 }")
    with pytest.raises(JobError, match="MultiStepLR in the checkpoint, CosineAnnealingLR in this job"):
        train(job_file, tmp_path, *options, resume=True)


def test_a_schedule_by_results_is_refused(job_file: Path, tmp_path: Path) -> None:
    options = ("--lr_schedule.name", "ReduceLROnPlateau", "--lr_schedule.arguments", "{}")
    with pytest.raises(JobError, match="ReduceLROnPlateau"):
        train(job_file, tmp_path, *options)
