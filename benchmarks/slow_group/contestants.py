"""The contestants of `slow_group.py`, and the settings that each of them tries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import optim

import hpcsgd

GROUPS = 4
EVERY = 16
"""H, the number of steps of a fast group from one synchronization to the next."""
Settings = Mapping[str, float]
DILOCO, ASYNC, HELOCO = "DiLoCo", "async DiLoCo", "HeLoCo"


@dataclass(frozen=True)
class Contestant:
    """A method, and the outer rates and momenta that are tried with it, as many for each."""

    method: Callable[[Settings], hpcsgd.Method]
    trials: Sequence[Settings]
    waits: bool = False
    """True if the groups wait for the slowest one."""


@dataclass(frozen=True)
class Training:
    """A training: who, with which settings and seed, and for which share of the seconds."""

    who: str
    settings: Settings
    seed: int
    share: float


def grid(outer_lr: Sequence[float], momentum: Sequence[float]) -> list[Settings]:
    return [{"outer_lr": lr, "momentum": mu} for lr, mu in product(outer_lr, momentum)]


def diloco(s: Settings) -> hpcsgd.Method:
    return hpcsgd.diloco(
        EVERY, outer=lambda ws: optim.SGD(ws, lr=s["outer_lr"], momentum=s["momentum"], nesterov=True)
    )


def async_diloco(s: Settings) -> hpcsgd.Method:
    return hpcsgd.async_diloco(EVERY, s["outer_lr"], s["momentum"], local_steps=hpcsgd.DynamicLocalSteps())


def heloco(s: Settings) -> hpcsgd.Method:
    return hpcsgd.heloco(EVERY, s["outer_lr"], s["momentum"], local_steps=hpcsgd.DynamicLocalSteps())


CONTESTANTS: dict[str, Contestant] = {
    DILOCO: Contestant(diloco, grid((0.7, 1.0), (0.5, 0.8)), waits=True),
    ASYNC: Contestant(async_diloco, grid((0.7, 1.0), (0.5, 0.8))),
    # HeLoCo's momentum is an average, which makes steps at most 1 + μ times as long: the others' steps add up
    # to 1/(1 − μ) times the rate.
    HELOCO: Contestant(heloco, grid((1.4, 2.8), (0.5, 0.9))),
}
