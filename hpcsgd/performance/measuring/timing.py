"""Times of what all ranks do together: they begin at the same moment, and the slowest one counts."""

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
"""Quick calls are timed several at a time, to last so long: ranks do not leave a meeting all at once."""
LARGEST_BLOCK = 20
SHARE = 0.25
"""A size whose first rounds alone would take more than this part of the time for all is the largest one."""


def clock(device: torch.device) -> float:
    """Seconds, as soon as `device` has done what it was given."""
    if on_accelerator(device):
        settle(device)
    return perf_counter()


class Together:
    """All ranks of `world`, whose lane must be idle whenever they meet: a meeting goes without it."""

    def __init__(self, world: Communicator) -> None:
        self._backend = world.backend
        self._nothing = torch.zeros(1, device="cpu")

    def barrier(self) -> None:
        """Return when all are here. Twice, for whoever has waited long looks seldom whether it is over."""
        self._backend.allreduce(self._nothing, "max")
        self._backend.allreduce(self._nothing, "max")

    def slowest(self, *seconds: float) -> list[float]:
        """Of each number the most that one of them says, on all of them."""
        most = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        self._backend.allreduce(most, "max")
        return most.tolist()


@dataclass
class Timed:
    """Seconds of a call, an entry a round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def scatter(self) -> float:
        """Half of the rounds are within so much of each other, as a part of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median


@dataclass
class Contest:
    """Calls of one size that take turns."""

    nbytes: int
    calls: Sequence[Callable[[], Any]]
    timed: list[Timed] = field(init=False)
    quickest: float = 0.0
    """Seconds of a round, of one call each, if nothing disturbs."""
    block: int = 1
    spent: float = 0.0

    def __post_init__(self) -> None:
        self.timed = [Timed() for _ in self.calls]

    def round(self, together: Together) -> None:
        """A block of each call."""
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

    def warm_up(self, together: Together) -> None:
        """Buffers, connections, code paths; then as many calls a block as are long enough."""
        self.round(together)
        self.round(together)
        self.quickest = sum(min(timed.seconds) for timed in self.timed)
        slowest = max(timed.seconds[-1] for timed in self.timed)
        self.block = max(1, min(LARGEST_BLOCK, int(BLOCK_SECONDS / max(slowest, 1e-9))))
        for timed in self.timed:
            timed.seconds.clear()


def feasible(together: Together, contests: Sequence[Contest], seconds: float) -> list[Contest]:
    """Those of `contests`, which ascend in size, that are quick enough for some rounds in `seconds`, warm."""
    kept: list[Contest] = []
    for contest in contests:
        contest.warm_up(together)
        kept.append(contest)
        if LEAST_ROUNDS * contest.quickest > SHARE * seconds and len(kept) >= SIZES:
            break
    return kept


def take_turns(together: Together, contests: Sequence[Contest], seconds: float) -> None:
    """Rounds of all of them, forth and back, for about so long: what disturbs for a while disturbs them all.

    All ranks come to the same decisions, since they go by the slowest one's seconds.
    """
    for turn in range(ROUNDS):
        for contest in contests[:: 1 if turn % 2 == 0 else -1]:
            if turn < LEAST_ROUNDS or contest.spent < seconds / len(contests):
                contest.round(together)
