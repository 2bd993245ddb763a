"""Buckets chosen by a few steps with each: what the run has, keeps and says."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcsgd.config.reader import read_toml
from hpcsgd.config.schema import load
from hpcsgd.core.topology import form
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.training import pace
from hpcsgd.training.assembly import Assembly, assemble
from hpcsgd.training.pace import BUCKETS_MB, Sending
from hpcsgd.transport import Transport, threads
from training.interruptions import Never, without_pictures
from training.launches import JOB, make_store

a_run = importlib.import_module("hpcsgd.training.run")  # the package has a function of that name
TWO = ("--job.groups", "1", "--model.build", "training.small:steady", "--model.arguments", "{ inputs = 36 }")


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB)
    without_pictures(monkeypatch)
    monkeypatch.setattr(pace, "gc", SimpleNamespace(collect=lambda: None))  # it is slow
    return tmp_path / "job.toml"


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> dict[Sending, float]:
    """Seconds that steps are said to take on rank 0; on rank 1 a hundredth more."""
    told: dict[Sending, float] = {}

    def times(parts: Assembly, config: Any, steps: int) -> list[float]:
        seconds = told[Sending(config.training.bucket_mb, config.training.overlap)]
        parts.optimizer.job.world.barrier()
        return [99.0] + [seconds + 0.01 * parts.optimizer.job.rank] * (steps - 1)

    monkeypatch.setattr(pace, "_times", times)
    return told


def chosen(job_file: Path, *words: str, resume: bool = False) -> Any:
    def one(world: Transport) -> Any:
        config = load(job_file, [*TWO, "--run.folder", str(job_file.parent / "run"), *words])
        return pace.tuned(config, form(world, 1), str(job_file), resume).training

    first, second = threads.run(2, one)
    assert first == second
    return first


def test_the_fastest_is_taken(job_file: Path, paces: dict[Sending, float], caplog: Any) -> None:
    caplog.set_level("INFO")
    paces |= {Sending(size, True): 1.0 for size in BUCKETS_MB} | {Sending(4.0, True): 0.5}
    paces[Sending(4.0, False)] = 0.6
    training = chosen(job_file, "--training.tune", "3")
    assert (training.bucket_mb, training.overlap, training.tune) == (4.0, True, None)
    paces[Sending(4.0, False)] = 0.4
    training = chosen(job_file, "--training.tune", "3")
    assert (training.bucket_mb, training.overlap) == (4.0, False)
    told = [record.getMessage() for record in caplog.records if "s a step" in record.getMessage()]
    assert told[-1] == "0.41 s a step with bucket_mb = 4, overlap = false: taken"


def test_what_is_said_is_not_tried(job_file: Path, paces: dict[Sending, float]) -> None:
    paces |= {Sending(7.0, True): 2.0, Sending(7.0, False): 1.0}
    training = chosen(job_file, "--training.tune", "1", "--training.bucket_mb", "7")
    assert (training.bucket_mb, training.overlap) == (7.0, False)
    paces |= {Sending(size, False): size for size in BUCKETS_MB}
    training = chosen(job_file, "--training.tune", "1", "--training.overlap", "false")
    assert (training.bucket_mb, training.overlap) == (1.0, False)


def test_real_steps_leave_nothing_behind(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that follows has the bits of one that was told the same."""
    monkeypatch.setattr(a_run, "Stopping", Never)
    folder = job_file.parent

    def one(world: Transport, name: str, *words: str) -> None:
        config = load(job_file, [*TWO, "--run.folder", str(folder / name), *words])
        reasons: Any = None
        a_run.train(config, form(world, 1), "job.toml", reasons, resume=False)

    threads.run(2, one, "tuned", "--training.tune", "1")
    training = read_toml(folder / "tuned" / "job.toml")["training"]
    assert training["bucket_mb"] in BUCKETS_MB
    overlap = str(training["overlap"]).lower()
    told = ("--training.bucket_mb", str(training["bucket_mb"]), "--training.overlap", overlap)
    threads.run(2, one, "told", *told)
    tuned, plain = (torch.load(folder / name / "model.pt") for name in ("tuned", "told"))
    assert all(torch.equal(value, plain[name]) for name, value in tuned.items())
    kept = chosen(job_file, "--training.tune", "1", "--run.folder", str(folder / "tuned"), resume=True)
    assert (kept.bucket_mb, kept.overlap) == (training["bucket_mb"], training["overlap"])


def test_the_optimizer_is_told(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    real = DistributedOptimizer.__init__
    monkeypatch.setattr(DistributedOptimizer, "__init__", lambda *a, **k: given.append(k) or real(*a, **k))

    def one(world: Transport) -> None:
        words = ["--training.bucket_mb", "0.5", "--training.overlap", "false"]
        assemble(load(job_file, [*TWO, *words]), form(world, 1), "job.toml")

    threads.run(2, one)
    assert [(each["bucket_mb"], each["overlap"]) for each in given] == [(0.5, False)] * 2
