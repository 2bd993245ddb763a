"""Who trains on how many ranks in `strong_scaling.py`, in which groups."""

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
"""Of a host's link: slow, and the model small, so that many ranks on few cores wait for links and not for
each other's turns."""
COMPUTE = 3.2
"""Seconds that one rank computes for the whole batch; n ranks each an n-th of that."""
LAYERS, WIDTH = 16, 130
"""270,400 parameters, about as many as ResNet-20 has."""
BUCKET_MB = 0.25
WARM_UP = 1
"""Steps."""
STEPS = 2
"""Of a block at least."""
DDP, SYNC, BASELINE, OURS = "DDP", "bsp", "allreduce-based", "hierarchical"
TO_ALL, LATE = "hierarchical, all-to-all", "hierarchical, delayed"


@dataclass(frozen=True)
class Figure:
    """Of the paper: so many groups, which meet every I steps."""

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
    """One contestant on N ranks."""

    who: str
    figure: str
    """Empty where it is synchronous, and so in all of them."""
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
        """Of a block."""
        return max(self.every, STEPS)

    def method(self) -> hpcsgd.Method:
        return LOCAL[self.who](self.every) if self.figure else hpcsgd.bsp()

    def entry(self) -> Entry:
        if self.who == DDP:
            return ddp(BUCKET_MB)
        # A late meeting begins with the first step of a block.
        lead = self.every - 1 - WARM_UP if self.who == LATE else 0
        return method(self.method, self.every, lead, bucket_cap_mb=BUCKET_MB)


def hosts(N: int) -> int:
    """As few as have room."""
    return -(-N // RANKS_PER_HOST)


def places(N: int) -> Iterator[Place]:
    """Who takes part: with fewer ranks than groups all are synchronous, as in the paper."""
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
