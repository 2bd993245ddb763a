"""Contestants in turn, and what their times say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import Protocol

WARM_UP = 2
"""Steps before the first block, at least: buffers, first touch of memory, code paths."""


def now() -> float:
    """Seconds on the clock by which everything here is timed, and events of a trace, too."""
    return perf_counter()


@dataclass(frozen=True)
class Spread:
    """A median, and the quartiles around it."""

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
    """Of blocks timed next to each other, so that what the machine did meanwhile falls out."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


@dataclass(frozen=True)
class Contestant:
    """What takes part in `interleaved`. Only steps are on the clock."""

    step: Callable[[], object]
    steps: int = 1
    """In a block."""
    settle: Callable[[], object] = lambda: None
    """After a block: messages under way must not meet the next one's."""
    warm: Callable[[], object] = lambda: None
    """After the warm-up: what a contestant counts begins here."""
    warm_up: int | None = None
    """Steps before the first block; without: as many as a block has, and WARM_UP at least."""


@dataclass(frozen=True)
class Blocks:
    """Seconds per step of one contestant, one entry a round: on the clock of the slowest rank, and of this
    process's CPU time."""

    wall: list[float]
    cpu: list[float]


class Ranks(Protocol):
    """All that time the same contestants together."""

    def meet(self) -> None:
        """Return when all of them are here."""

    def slowest(self, seconds: float) -> float:
        """The most that one of them says, on each of them."""
        ...


class Alone:
    """One rank."""

    def meet(self) -> None:
        """Nobody has to be waited for."""

    def slowest(self, seconds: float) -> float:
        return seconds


class Clock(Protocol):
    def start(self) -> None: ...

    def stop(self) -> float:
        """Seconds since `start`."""
        ...


class WallClock:
    """Of what has been done, also where a device does it: `done` returns when nothing is under way."""

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
    """Each contestant runs a block of its steps in every round, in turn: A B C, C B A, A B C, …

    All `ranks` (without: this one alone) begin a block together, and a step takes as long as it does on the
    slowest of them, by `clock` (without: the wall's).
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
    """Seconds a step: of the slowest rank, and of this process's CPU time."""
    ranks.meet()
    cpu = process_time()
    clock.start()
    for _ in range(contestant.steps):
        contestant.step()
    wall = clock.stop()
    cpu = process_time() - cpu
    contestant.settle()
    return ranks.slowest(wall) / contestant.steps, cpu / contestant.steps
