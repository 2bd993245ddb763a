"""The contestants of `bytes_at_quality.py`, and the settings with which each was tried before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import nn, optim

import hpcsgd
from hpcsgd.parts import outer_schedules, quantizers
from hpcsgd.parts.averagers.outer_step import MakeOptimizer
from hpcsgd.parts.outer_schedules.base import OuterSchedule
from hpcsgd.parts.quantizers.base import Quantizer

EVERY = 64
"""H, the number of steps from one synchronization to the next."""
OFTEN = 16
"""H of the contestants that synchronize four times as often."""
EVERY_BY_GROUPS = 6
"""SparseLoCo's H divided by P, because what a rank sends per synchronization grows with P."""
FRAGMENTS = 4
BETAS, DECAY = (0.9, 0.95), 0.1
Settings = Mapping[str, Any]
"""The values of a trial: numbers, and the name of a schedule."""
BSP, DILOCO, STREAMED = "bsp", "DiLoCo", "streamed, 4 bits"
SPARSE, MULOCO = "SparseLoCo", "MuLoCo, 4 bits"
SCHEDULED, PIER = "DiLoCo, schedule", "Pier"
STREAMED_SCHEDULED, SPARSE_SCHEDULED = "streamed, 4 bits, schedule", "SparseLoCo, schedule"
DILOCO_OFTEN, STREAMED_OFTEN = "DiLoCo, every 16", "streamed, 4 bits, every 16"


@dataclass(frozen=True)
class Contestant:
    method: Callable[[Settings, int, int], hpcsgd.Method]
    """Returns the method of a trial for a number of groups and of steps."""
    trials: Sequence[Settings]
    """The settings that are tried, as many for each contestant; the best one is taken."""
    optimizer: Callable[[nn.Module, Settings], optim.Optimizer]
    """Returns the optimizer inside a group, with the trial's `lr`."""


def adamw(model: nn.Module, s: Settings) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=s["lr"], betas=BETAS, weight_decay=DECAY)


def muon(model: nn.Module, s: Settings) -> optim.Optimizer:
    return hpcsgd.muon(model, lr=s["lr"], weight_decay=DECAY, rest={"betas": BETAS})


RATES = (4e-3, 8e-3)
"""Learning rates inside a group, for all that have an outer learning rate too."""
MOMENTUM = 0.8
"""Momentum of the outer optimizer.

The papers' 0.9 averages over ten synchronizations, a sixth of all synchronizations here. DiLoCo was worse
with it.
"""
DELAY, BLEND = 1, 0.0
"""Settings of streaming.

With the paper's blend of one half, groups take half of an outer step, which was worse.
"""


WITH_SCHEDULES = (8e-3, 16e-3)
"""Learning rates inside a group, for all whose outer values follow a schedule.

For the others 8e-3 was the better one.
"""
LAZY = 0.1
"""The share of the run in which Pier is synchronous."""
SCHEDULES: Mapping[str, Callable[[int, float], OuterSchedule]] = {
    "muloco": lambda steps, begin: outer_schedules.muloco(),
    "pier": outer_schedules.pier,
    "pier_cosine": outer_schedules.pier_cosine,
}
"""Functions, by name, that make the outer schedule of a run of so many steps.

The schedule begins at the given fraction of the run.
"""


def schedule(s: Settings, steps: int, begin: float = 0.0) -> OuterSchedule:
    return SCHEDULES[s["schedule"]](steps, begin)


def nesterov(s: Settings) -> MakeOptimizer:
    return lambda ws: optim.SGD(ws, lr=s["outer_lr"], momentum=s["momentum"], nesterov=True)


def in_four_bits(s: Settings) -> hpcsgd.Method:
    return hpcsgd.diloco(EVERY, outer=nesterov(s), quantize=quantizers.int4(block=256))


def scheduled(
    s: Settings, steps: int, quantize: Quantizer | None = None, every: int = EVERY
) -> hpcsgd.Method:
    return hpcsgd.diloco(every, outer_schedule=schedule(s, steps), quantize=quantize)


def streamed(s: Settings, steps: int, every: int = EVERY) -> hpcsgd.Method:
    return hpcsgd.streaming(scheduled(s, steps, quantizers.int4(block=256), every), FRAGMENTS, DELAY, BLEND)


def scheduled_pier(s: Settings, steps: int) -> hpcsgd.Method:
    return hpcsgd.pier(EVERY, steps, LAZY, outer_schedule=schedule(s, steps, LAZY))


def falling(s: Settings, steps: int) -> OuterSchedule:
    return outer_schedules.piecewise(steps, lr=[[0, s["first_lr"]], [1, s["last_lr"]]])


def grid(**values: Sequence[Any]) -> list[Settings]:
    return [dict(zip(values, each, strict=True)) for each in product(*values.values())]


def with_outer(**inner: Sequence[float]) -> list[Settings]:
    return grid(**inner, outer_lr=(0.7, 1.0), momentum=(MOMENTUM,))


CONTESTANTS: dict[str, Contestant] = {
    BSP: Contestant(lambda s, *_: hpcsgd.bsp(), grid(lr=(8e-3, 16e-3, 24e-3, 32e-3)), adamw),
    DILOCO: Contestant(lambda s, *_: hpcsgd.diloco(EVERY, outer=nesterov(s)), with_outer(lr=RATES), adamw),
    STREAMED: Contestant(
        lambda s, *_: hpcsgd.streaming(in_four_bits(s), FRAGMENTS, int(s["delay"]), s["blend"]),
        with_outer(lr=RATES, delay=(DELAY,), blend=(BLEND,)),
        adamw,
    ),
    SPARSE: Contestant(
        lambda s, groups, _: hpcsgd.sparseloco(EVERY_BY_GROUPS * groups, lr=s["outer_lr"]),
        grid(lr=RATES, outer_lr=(1.0, 1.4)),
        adamw,
    ),
    MULOCO: Contestant(lambda s, *_: in_four_bits(s), with_outer(lr=RATES), muon),
    SCHEDULED: Contestant(
        lambda s, _, steps: scheduled(s, steps),
        grid(lr=WITH_SCHEDULES, schedule=("muloco", "pier_cosine")),
        adamw,
    ),
    PIER: Contestant(
        lambda s, _, steps: scheduled_pier(s, steps),
        grid(lr=WITH_SCHEDULES, schedule=("pier", "pier_cosine")),
        adamw,
    ),
    STREAMED_SCHEDULED: Contestant(
        lambda s, _, steps: streamed(s, steps),
        grid(lr=WITH_SCHEDULES, schedule=("muloco", "pier_cosine")),
        adamw,
    ),
    SPARSE_SCHEDULED: Contestant(
        lambda s, groups, steps: hpcsgd.sparseloco(
            EVERY_BY_GROUPS * groups, outer_schedule=falling(s, steps)
        ),
        grid(lr=WITH_SCHEDULES, first_lr=(1.4, 2.0), last_lr=(1.0,)),
        adamw,
    ),
    DILOCO_OFTEN: Contestant(
        lambda s, _, steps: scheduled(s, steps, every=OFTEN),
        grid(lr=WITH_SCHEDULES, schedule=("muloco", "pier_cosine")),
        adamw,
    ),
    STREAMED_OFTEN: Contestant(
        lambda s, _, steps: streamed(s, steps, OFTEN),
        grid(lr=WITH_SCHEDULES, schedule=("muloco", "pier_cosine")),
        adamw,
    ),
}
