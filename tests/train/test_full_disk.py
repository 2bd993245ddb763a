"""A disk that is full ends a run with one line on all ranks, and no checkpoint is lost."""

from __future__ import annotations

import errno
import importlib
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcsgd.checkpoint import Checkpoints
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError
from hpcsgd.report.metrics import Metrics, read
from hpcsgd.train import stopping
from hpcsgd.train.loop import TrainLoop
from hpcsgd.train.static_run import StaticRun
from hpcsgd.train.stopping import Reasons, Stopping
from hpcsgd.train.training_setup import assemble
from train.launches import JOB, make_store

a_run = importlib.import_module("hpcsgd.train.run")  # the package has a function of that name
FULL_AT = 4  # the first step without a record
TRAIN = 480  # 30 steps an epoch


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the disk be full from a step on. Return an event that is set then."""
    write, happened = Metrics._write, threading.Event()

    def writes(metrics: Metrics, line: bytes) -> None:
        if f'"step": {FULL_AT},'.encode() in line:
            happened.set()
        if happened.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(metrics, line)

    monkeypatch.setattr(Metrics, "_write", writes)
    monkeypatch.setattr(stopping, "CHECK_EVERY", 0.0)  # a check after each step
    return happened


def errors(folder: Path, *options: str) -> list[str]:
    """Train on two ranks, and return the message of each rank's error."""
    make_store(folder / "small.h5", TRAIN, 20)
    (folder / "job.toml").write_text(JOB)

    def one(world: Communicator) -> str:
        config = load(folder / "job.toml", [*options, "--run.output_dir", str(folder)])
        parts = assemble(config, form(world, 1), "job.toml")
        never = cast(Reasons, SimpleNamespace(now=lambda: 0))
        with ExitStack() as files, pytest.raises(JobError) as caught:
            setting, control = StaticRun(config, parts.optimizer.topology), world.dup_with_thread()
            a_run._train(setting, parts, Stopping(never, control), control, False, files)
        return str(caught.value)

    return threads.run(2, one)


def line(folder: Path) -> str:
    what = f"cannot be written: {os.strerror(errno.ENOSPC)}: make space on its disk, and pass --resume"
    return f"rank 0 of 2, writing metrics: {folder}/metrics.jsonl: {what}"


@pytest.mark.usefixtures("full")
def test_metrics_that_cannot_be_written_end_the_run_within_the_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    step = TrainLoop._step

    def counted(*arguments: Any) -> None:
        steps.append(0)
        step(*arguments)

    monkeypatch.setattr(TrainLoop, "_step", counted)
    assert errors(tmp_path) == [line(tmp_path)] * 2
    assert {record["step"] for record in read(tmp_path / "metrics.jsonl")} == set(range(1, FULL_AT))
    assert len(steps) < 2 * (TRAIN // 16)
    assert not (tmp_path / "model.pt").exists()


def test_the_checkpoint_that_is_being_written_then_is_finished(
    tmp_path: Path, full: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint of a later step is made, because a run that went on there would lack records."""
    write = Checkpoints._write_own

    def slowly(*arguments: Any) -> Any:
        assert full.wait(60)
        return write(*arguments)

    monkeypatch.setattr(Checkpoints, "_write_own", slowly)
    every = str(FULL_AT - 1)
    assert errors(tmp_path, "--training.checkpoint_every_steps", every) == [line(tmp_path)] * 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-0000000{every}"]
    found = threads.run(1, lambda world: Checkpoints(tmp_path / "checkpoints", form(world)).newest())
    assert found[0] is not None
