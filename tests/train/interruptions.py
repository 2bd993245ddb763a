"""Runs of a job file in one process, on threads, which are interrupted."""

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

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.topology import form
from hpcsgd.train.static_run import StaticRun
from hpcsgd.train.training_setup import TrainingSetup, assemble

PATIENCE = 60.0  # seconds; the machine may be busy
_run = importlib.import_module("hpcsgd.train.run")  # the package has a function of that name


class Killed(Exception):
    """Raised in place of a kill from outside."""


def stopped(_: int) -> str:
    return "enough"


def killed(_: int) -> str:
    raise Killed


class Never:
    """A stand-in for `Stopping`, which handles signals and so needs the main thread."""

    def __init__(self, *_: Any) -> None: ...

    def now(self) -> str | None:
        return None

    def at_once(self) -> str | None:
        return None


class Interruption:
    """A stand-in for `Stopping` that calls `what` after one step, or at one check around an evaluation."""

    def __init__(self, parts: TrainingSetup, step: int, what: Callable[[int], str], check: int) -> None:
        self._parts, self._step, self._what, self._checks = parts, step, what, check

    def now(self) -> str | None:
        t = self._parts.optimizer.t
        return self._what(t) if t == self._step else None

    def at_once(self) -> str | None:
        self._checks -= 1
        return self._what(self._parts.optimizer.t) if self._checks == 0 else None


def train(
    job_file: Path,
    folder: Path,
    *options: str,
    n: int = 1,
    at: int = -1,
    check: int = 0,
    what: Callable[[int], str] = stopped,
    resume: bool = False,
) -> list[str | None]:
    """Train like the command, but on `n` threads, and return the reasons for stopping.

    `what` is called after step `at`, and at check number `check`, counted from 1: there is one before each
    evaluation, and one after it.
    """

    def one(world: Communicator) -> str | None:
        config = load(job_file, [*options, "--run.output_dir", str(folder)])
        parts = assemble(config, form(world, config.parallel.groups), job_file.name)
        interruption: Any = Interruption(parts, at, what, check)
        with ExitStack() as files:
            setting, control = StaticRun(config, parts.optimizer.topology), world.dup_with_thread()
            try:
                return _run._train(setting, parts, interruption, control, resume, files)
            except Killed:
                world.close_dups(PATIENCE)  # no rank is left that would write
                raise

    folder.mkdir(exist_ok=True)
    return threads.run(n, one)


def outcome(folder: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines.sort(key=lambda r: (r["step"], r["kind"]))  # a record comes once all ranks have made the step
    timed = {"seconds", "samples_per_s", "tokens_per_s", "utilization"}
    records = [{k: v for k, v in r.items() if k not in timed and not k.endswith("_seconds")} for r in lines]
    return torch.load(folder / "model.pt"), records


def assert_same_outcome(one: Path, other: Path) -> None:
    (model, records), (their_model, their_records) = outcome(one), outcome(other)
    assert records == their_records
    assert model.keys() == their_model.keys()
    assert all(torch.equal(value, their_model[name]) for name, value in model.items())


def assert_interruptions_change_nothing(job_file: Path, folder: Path, *options: str) -> None:
    """Check that interruptions on 4 ranks do not change the result.

    The run is killed after step 3, resumed, stopped after step 5 and resumed.
    """
    whole, other = folder / "whole", folder / "other"
    train(job_file, whole, *options, n=4)
    with pytest.raises(Killed):
        train(job_file, other, *options, n=4, at=3, what=killed)
    train(job_file, other, *options, n=4, at=5, what=stopped, resume=True)
    train(job_file, other, *options, n=4, resume=True)
    assert_same_outcome(whole, other)
    assert len(outcome(whole)[1]) > 6


def without_pictures(patch: pytest.MonkeyPatch) -> None:
    """Switch off plots, which take longer than these runs."""
    patch.setattr("hpcsgd.train.static_run._report", lambda _: None)
