"""Time calls that all ranks make together. All begin at the same time, and the slowest rank counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

from hpcsgd.comm import Communicator
from hpcsgd.comm.streams import on_accelerator, settle
from hpcsgd.cost.fit import SIZES

ROUNDS = 40
LEAST_ROUNDS = 3
BLOCK_SECONDS = 2e-3
"""Seconds of a timed block of short calls; one call is too short, because ranks leave barriers unevenly."""
LARGEST_BLOCK = 20
SHARE = 0.25
"""The largest message size is the first whose `LEAST_ROUNDS` rounds take more than this share of the time."""


def clock(device: torch.device) -> float:
    """Wait until `device` has done all work given to it, and return the time in seconds."""
    if on_accelerator(device):
        settle(device)
    return perf_counter()


class Barriers:
    """Barriers of all ranks of `world` that do not use its communication thread, which must be idle."""

    def __init__(self, world: Communicator) -> None:
        self._backend = world.backend
        self._nothing = torch.zeros(1, device="cpu")

    def barrier(self) -> None:
        """Wait for all ranks, twice, because a rank that has waited long polls rarely and continues late."""
        self._backend.allreduce(self._nothing, "max")
        self._backend.allreduce(self._nothing, "max")

    def slowest(self, *seconds: float) -> list[float]:
        """Return the maximum of each number over the ranks, on all ranks."""
        most = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        self._backend.allreduce(most, "max")
        return most.tolist()


@dataclass
class Timed:
    """The seconds of one call, measured in several rounds."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def scatter(self) -> float:
        """The interquartile range of the seconds, as a share of their median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median


@dataclass
class Contest:
    """Several calls with the same message size, which are timed in turn."""

    nbytes: int
    calls: Sequence[Callable[[], Any]]
    timed: list[Timed] = field(init=False)
    quickest: float = 0.0
    """The shortest seconds of each call, added over the calls."""
    block: int = 1
    spent: float = 0.0

    def __post_init__(self) -> None:
        self.timed = [Timed() for _ in self.calls]

    def round(self, together: Barriers) -> None:
        """Time `block` repetitions of each call; all ranks record the slowest rank's seconds per call."""
        for call, timed in zip(self.calls, self.timed, strict=True):
            begun = perf_counter()
            together.barrier()
            start = perf_counter()
            for _ in range(self.block):
                call()
            now = perf_counter()
            seconds, spent = together.slowest(now - start, now - begun)
            timed.seconds.append(seconds / self.block)
            self.spent += spent

    def warm_up(self, together: Barriers) -> None:
        """Make the calls twice to warm up buffers and connections, and choose `block` by their seconds."""
        self.round(together)
        self.round(together)
        self.quickest = sum(min(timed.seconds) for timed in self.timed)
        slowest = max(timed.seconds[-1] for timed in self.timed)
        self.block = max(1, min(LARGEST_BLOCK, int(BLOCK_SECONDS / max(slowest, 1e-9))))
        for timed in self.timed:
            timed.seconds.clear()


def feasible(together: Barriers, contests: Sequence[Contest], seconds: float) -> list[Contest]:
    """Warm up `contests`, ordered by size, and return those that `seconds` suffice to time in rounds."""
    kept: list[Contest] = []
    for contest in contests:
        contest.warm_up(together)
        kept.append(contest)
        if LEAST_ROUNDS * contest.quickest > SHARE * seconds and len(kept) >= SIZES:
            break
    return kept


def take_turns(together: Barriers, contests: Sequence[Contest], seconds: float) -> None:
    """Time rounds of all contests for about `seconds`, in turn, so that a disturbance affects all of them.

    Every second turn is in reverse order. All ranks stop alike, because they use the slowest rank's seconds.
    """
    for turn in range(ROUNDS):
        for contest in contests[:: 1 if turn % 2 == 0 else -1]:
            if turn < LEAST_ROUNDS or contest.spent < seconds / len(contests):
                contest.round(together)
