"""The cases that are run and simulated: methods × which ranks are late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from torch import nn

from hpcsgd.methods import Method, async_sgd, bsp, hierarchical, osgp, sgp, ssp
from hpcsgd.performance.simulation.compute import Seconds
from hpcsgd.performance.simulation.durations import Durations, Message

P = 4
"""Number of groups of one rank, each on a host of its own."""
RATE = 300e6
"""Bits per second of each host's link."""
SECONDS = 0.15
"""Seconds of a step's computing.

It is a pause, since four hosts share two cores here, and a pass through a small model.
"""
INPUTS, WIDTH = 64, 400


@dataclass(frozen=True)
class Case:
    method: Callable[[], Method]
    durations: Callable[[float], Durations]
    """Returns the durations, given the seconds of a step that are not computing."""


def one_by_one(between: float) -> Durations:
    return Durations(message=Message(link=between))


def behind(between: float) -> Durations:
    """Return durations for a message that is sent during the next step, unless that step has to wait for it.

    The message takes the time of the link; the rest of a step is the group's own work.
    """
    nbytes = sum(4 * param.numel() for param in network().parameters())
    return Durations(update=between, message=Message(link=8 * nbytes / RATE))


CASES = {
    "bsp": Case(bsp, lambda s: Durations(model_average=s)),
    "hierarchical": Case(lambda: hierarchical(4), lambda s: Durations(model_average=4 * s)),
    "sgp": Case(sgp, one_by_one),
    "osgp": Case(lambda: osgp(1), behind),
    "ssp": Case(lambda: ssp(2), one_by_one),
    "async_sgd": Case(async_sgd, one_by_one),
}
LATE = ["nobody", "rank 2, twice as long", "one in five, thrice as long"]
FIRST = 1
"""The first step that counts; the one before it sets up."""


def factor(late: str, rank: int, t: int) -> float:
    """Return how many times as long as others this rank takes in step t."""
    if late == "nobody":
        return 1.0
    if late.startswith("rank 2"):
        return 2.0 if rank == 2 else 1.0
    drawn = torch.rand(1, generator=torch.Generator().manual_seed(1000 * t + rank)).item()
    return 3.0 if drawn < 0.2 else 1.0


class AsInTheRun:
    """Stragglers of the simulation: the same ranks are late in the same steps as in the run.

    The factors are asked for one step after another.
    """

    def __init__(self, late: str) -> None:
        self._late = late
        self._t = FIRST

    def factors(self, steady: Generator, anew: Generator, n: int) -> Seconds:
        told = np.array([factor(self._late, rank, self._t) for rank in range(n)])
        self._t += 1
        return told


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10))
