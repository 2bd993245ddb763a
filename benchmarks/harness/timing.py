"""Time contestants in turn, and summarize their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import Protocol

WARM_UP = 2
"""The minimum number of warm-up steps. They create buffers, touch memory and run each code path once."""


def now() -> float:
    """Return the seconds on the clock that times everything here, and the events of a trace."""
    return perf_counter()


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the spread of ratios of adjacent blocks, in which the machine's other load cancels out."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


@dataclass(frozen=True)
class Contestant:
    """One of the programs that `interleaved` compares. Only its steps are timed."""

    step: Callable[[], object]
    steps: int = 1
    """The number of steps in a block."""
    settle: Callable[[], object] = lambda: None
    """It is called after a block, so that no pending messages overlap with the next block."""
    warm: Callable[[], object] = lambda: None
    """It is called after the warm-up. A contestant starts its own counters here."""
    warm_up: int | None = None
    """Steps before the first block. If None: as many as a block has, but at least WARM_UP."""


@dataclass(frozen=True)
class Blocks:
    """Seconds per step of one contestant, one entry per round.

    `wall` is the wall-clock time of the slowest rank, `cpu` the CPU time of this process.
    """

    wall: list[float]
    cpu: list[float]


class Ranks(Protocol):
    """All ranks that time the same contestants together."""

    def meet(self) -> None:
        """Return when all ranks have called this."""

    def slowest(self, seconds: float) -> float:
        """Return the maximum of `seconds` over the ranks, on each of them."""
        ...


class Alone:
    """A single rank."""

    def meet(self) -> None:
        """Return at once, because there are no other ranks."""

    def slowest(self, seconds: float) -> float:
        return seconds


class Clock(Protocol):
    def start(self) -> None: ...

    def stop(self) -> float:
        """Return the seconds since `start`."""
        ...


class WallClock:
    """The wall clock. `done` returns when all pending work has ended, such as that of a GPU."""

    def __init__(self, done: Callable[[], object] = lambda: None) -> None:
        self._done = done
        self.start()

    def start(self) -> None:
        self._done()
        self._started = perf_counter()

    def stop(self) -> float:
        self._done()
        return perf_counter() - self._started


def interleaved(
    contestants: Mapping[str, Contestant],
    *,
    rounds: int,
    ranks: Ranks | None = None,
    clock: Clock | None = None,
) -> dict[str, Blocks]:
    """Time the contestants in turn; each runs one block of steps per round: A B C, C B A, A B C, …

    All `ranks` begin a block together, and the time of a step is that of the slowest rank. The defaults are
    this rank alone and the wall clock.
    """
    ranks, clock = ranks or Alone(), clock or WallClock()
    for each in contestants.values():
        for _ in range(max(WARM_UP, each.steps) if each.warm_up is None else each.warm_up):
            each.step()
        each.settle()
        each.warm()
    blocks = {name: Blocks([], []) for name in contestants}
    for turn in range(rounds):
        for name in list(contestants)[:: 1 if turn % 2 == 0 else -1]:
            wall, cpu = _block(contestants[name], ranks, clock)
            blocks[name].wall.append(wall)
            blocks[name].cpu.append(cpu)
    return blocks


def _block(contestant: Contestant, ranks: Ranks, clock: Clock) -> tuple[float, float]:
    """Run one block; return the slowest rank's seconds per step and this process's CPU seconds per step."""
    ranks.meet()
    cpu = process_time()
    clock.start()
    for _ in range(contestant.steps):
        contestant.step()
    wall = clock.stop()
    cpu = process_time() - cpu
    contestant.settle()
    return ranks.slowest(wall) / contestant.steps, cpu / contestant.steps
