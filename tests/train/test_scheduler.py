"""Tests of a schedule that is resumed, with the same arguments and with others."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, PolynomialLR

from hpcsgd.train.scheduler import resume_scheduler, scheduler_state
from train.interruptions import train, without_pictures
from train.launches import JOB, make_store

Make = Callable[..., LRScheduler]


def of(make: Make, lr: float = 0.1, **arguments: Any) -> LRScheduler:
    return make(SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr), **arguments)


def rates(scheduler: LRScheduler, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        found.append(scheduler.optimizer.param_groups[0]["lr"])
    return found


def gone_on(make: Make, before: dict[str, Any], after: dict[str, Any], steps: int) -> LRScheduler:
    """Return a scheduler with arguments `after`, resumed from `steps` steps with arguments `before`."""
    first, second = of(make, **before), of(make, **after)
    rates(first, steps)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    resume_scheduler(second, scheduler_state(first), after)
    return second


@pytest.mark.parametrize("make", [CosineAnnealingLR, PolynomialLR])
@pytest.mark.parametrize(("was", "now", "at"), [(10, 20, 4), (20, 10, 4), (10, 20, 10)])
def test_another_length_holds_from_here_on(make: Make, was: int, now: int, at: int) -> None:
    name = "T_max" if make is CosineAnnealingLR else "total_iters"
    second = gone_on(make, {name: was}, {name: now}, at)
    wanted = rates(of(make, **{name: now}), now)
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(wanted[at - 1])
    assert rates(second, now - at) == pytest.approx(wanted[at:], abs=1e-12)


def test_the_same_arguments_give_the_same_bits() -> None:
    second = gone_on(CosineAnnealingLR, {"T_max": 30}, {"T_max": 30}, 7)
    assert rates(second, 23) == rates(of(CosineAnnealingLR, T_max=30), 30)[7:]


def test_the_place_is_the_checkpoints() -> None:
    second = gone_on(CosineAnnealingLR, {"T_max": 30}, {"T_max": 30, "last_epoch": -1}, 7)
    assert rates(second, 23) == rates(of(CosineAnnealingLR, T_max=30), 30)[7:]


def test_one_that_cannot_says_so(caplog: pytest.LogCaptureFixture) -> None:
    before = {"max_lr": 0.1, "total_steps": 30}
    with caplog.at_level(logging.WARNING):
        second = gone_on(OneCycleLR, before, before | {"total_steps": 40}, 7)
    assert "total_steps 30 → 40: OneCycleLR keeps those that it began with" in caplog.text
    assert rates(second, 22) == rates(of(OneCycleLR, **before), 29)[7:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "at", "then", "budget", "whole"),
    [
        (2, 4, 1, "epochs 4", 10),
        (1, 6, 2, "epochs 4", 10),
        (1, 5, 2, "epochs 4", 10),
        (1, 6, 1, "epochs 8", 24),
        (1, 6, 1, "epochs 4", 12),
        (1, 3, 2, "samples 112", 6),
        (1, 2, 2, "samples 112", 6),
        (1, 3, 2, "steps 9", 9),
    ],
)
def test_the_length_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, at: int, then: int, budget: str, whole: int
) -> None:
    """The cosine ends where the run does, even if groups or epochs change at a step, and after another stop.

    The run begins with four epochs of 48 samples, or a budget of that length, in batches of 16 per group.
    """
    without_pictures(monkeypatch)
    make_store(tmp_path / "small.h5")
    job_file, run = tmp_path / "job.toml", tmp_path / "run"
    schedule = {"name": "CosineAnnealingLR", "arguments": '{ T_max = "length" }', "interval": "step"}
    words = [
        "--lr_schedule.scaling",
        "none",
        *(f"--lr_schedule.{key}={value}" for key, value in schedule.items()),
    ]
    job_file.write_text(JOB)

    def go(groups: int, budget: str, **how: Any) -> None:
        key, count = budget.split()
        none = [] if key == "epochs" else ["--training.epochs", "none"]
        options = [*words, "--parallel.groups", str(groups), *none, f"--training.{key}", count]
        train(job_file, run, *options, n=groups, **how)

    go(first, "epochs 4" if "epochs" in budget else budget, at=at)
    go(then, budget, at=at + 1, resume=True)
    go(then, budget, resume=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    later = {line["step"]: line["lr"] for line in lines if line["kind"] == "step" and line["step"] > at}
    wanted = {t: 0.05 * (1 + math.cos(math.pi * (t - 1) / whole)) for t in range(at + 1, whole + 1)}
    assert later == pytest.approx(wanted, rel=1e-3)
