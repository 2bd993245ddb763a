"""Which rank's time counts, how often calls are timed, and which sizes are measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hpcsgd.comm import Communicator
from hpcsgd.performance.measuring import timing
from hpcsgd.performance.measuring.timing import (
    LARGEST_BLOCK,
    LEAST_ROUNDS,
    Barriers,
    Contest,
    Timed,
    feasible,
    take_turns,
)

Run = Callable[..., list[Any]]
LATE = 0.02


def slowest(world: Communicator) -> list[float]:
    """Return the times of a round in which rank 1 begins late and then is slow."""
    together = Barriers(world)
    contest = Contest(8, [lambda: time.sleep(LATE * world.rank)])
    time.sleep(LATE * 2 * world.rank)
    contest.round(together)
    return contest.timed[0].seconds


@pytest.mark.ranks(2)
def test_the_slowest_rank_counts_and_late_ones_are_waited_for(run: Run) -> None:
    one, other = run(2, slowest)
    assert one == other
    assert one[0] >= LATE


class Clock(threading.local):
    """A clock per rank, which advances only by the given durations of calls."""

    now = 0.0

    def passes(self, seconds: float) -> None:
        self.now += seconds


def taken(world: Communicator, clock: Clock) -> tuple[list[int], list[int], list[int]]:
    """Return the sizes that were kept, the calls per block, and the rounds.

    Each size takes three times as long as the one before.
    """
    together = Barriers(world)
    contests = [Contest(3**i, [partial(clock.passes, 3**i * 1e-4)]) for i in range(8)]
    kept = feasible(together, contests, seconds=0.1)
    take_turns(together, kept, seconds=0.1)
    return [c.nbytes for c in kept], [c.block for c in kept], [len(c.timed[0].seconds) for c in kept]


@pytest.mark.ranks(2)
def test_what_is_slow_is_timed_seldom_and_ends_the_list(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", lambda: clock.now)
    (sizes, blocks, rounds), other = run(2, taken, clock)
    assert (sizes, blocks, rounds) == other
    assert 4 <= len(sizes) < 8
    assert blocks[0] > 1 == blocks[-1]
    assert max(blocks) <= LARGEST_BLOCK
    assert rounds[0] >= rounds[-1] >= LEAST_ROUNDS


def test_scatter() -> None:
    assert Timed([1.0]).scatter == 0.0
    assert Timed([2.0, 2.0, 2.0, 2.0, 50.0]).scatter == 0.0
    assert Timed([1.0, 2.0, 3.0, 4.0, 5.0]).scatter == pytest.approx(2 / 3)
