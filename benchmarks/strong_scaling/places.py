"""The contestants of `strong_scaling.py`, and into which groups they divide how many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import hpcsgd
from harness.workloads import Workload
from step_time.contestants import Entry, ddp, method
from step_time.networks import CLASSES, Compute, Sleeping

RANKS = (1, 2, 4, 8, 16)
RANKS_PER_HOST = 2
RATE, BITS = "30mbit", 30e6
"""Rate of a host's link.

It is slow, and the model is small, so that many ranks on few cores wait for links and not for each other's
turns.
"""
COMPUTE = 3.2
"""Seconds that one rank computes for the whole batch; each of n ranks computes 1/n of that."""
LAYERS, WIDTH = 16, 130
"""270,400 parameters, about as many as ResNet-20 has."""
BUCKET_MB = 0.25
WARM_UP = 1
"""Number of steps."""
STEPS = 2
"""Minimum number of steps of a block."""
DDP, SYNC, BASELINE, OURS = "DDP", "bsp", "allreduce-based", "hierarchical"
TO_ALL, LATE = "hierarchical, all-to-all", "hierarchical, delayed"


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: P groups, which synchronize every `every` steps."""

    P: int
    every: int


FIGURES = {"figure 5": Figure(4, 8), "figure 9": Figure(8, 4)}
LOCAL: dict[str, Callable[[int], hpcsgd.Method]] = {
    BASELINE: hpcsgd.allreduce_local_sgd,
    OURS: hpcsgd.hierarchical,
    TO_ALL: lambda every: hpcsgd.hierarchical(every, hpcsgd.AllToAll()),
    LATE: lambda every: hpcsgd.delayed(hpcsgd.hierarchical(every), every),
}


@dataclass(frozen=True)
class Place:
    """A contestant on a number of ranks."""

    who: str
    figure: str
    """The figure; empty for synchronous SGD, which belongs to all of them."""
    P: int
    K: int

    @property
    def name(self) -> str:
        return f"{self.who} {self.figure}"

    @property
    def every(self) -> int:
        return FIGURES[self.figure].every if self.figure else 1

    @property
    def steps(self) -> int:
        """Return the number of steps of a block."""
        return max(self.every, STEPS)

    def method(self) -> hpcsgd.Method:
        return LOCAL[self.who](self.every) if self.figure else hpcsgd.bsp()

    def entry(self) -> Entry:
        if self.who == DDP:
            return ddp(BUCKET_MB)
        # A delayed average begins with the first step of a block.
        lead = self.every - 1 - WARM_UP if self.who == LATE else 0
        return method(self.method, self.every, lead, bucket_cap_mb=BUCKET_MB)


def hosts(N: int) -> int:
    """Return the least number of hosts for N ranks."""
    return -(-N // RANKS_PER_HOST)


def places(N: int) -> Iterator[Place]:
    """Yield the contestants; with fewer ranks than groups all are synchronous, as in the paper."""
    yield Place(SYNC, "", hosts(N), N // hosts(N))
    if N > 1:
        yield Place(DDP, "", 1, N)
    for name, figure in FIGURES.items():
        if figure.P <= N:
            yield from (Place(who, name, figure.P, N // figure.P) for who in LOCAL)


def workload(compute: Compute) -> Workload:
    return Workload("0.27 M", partial(network, compute), (1, CLASSES))


def network(compute: Compute) -> nn.Module:
    gradient = 1e-3 * torch.randn(WIDTH, WIDTH)
    return nn.Sequential(*(Sleeping(gradient, compute, 1 / LAYERS) for _ in range(LAYERS)))
