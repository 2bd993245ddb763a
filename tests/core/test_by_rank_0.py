"""Tests of work done by rank 0 alone: others wait for it longer than for a rank that sends nothing."""

from __future__ import annotations

import threading

import pytest
import torch

from hpcsgd.comm import Communicator, threads
from hpcsgd.core import by_rank_0 as module
from hpcsgd.core.by_rank_0 import by_rank_0
from hpcsgd.errors import JobError, UserError

PATIENCE = 60.0  # seconds; the machine may be busy
BEATS = 5


def test_others_hear_that_rank_0_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """They receive sign after sign, and the work does not end before several of these have arrived."""
    heard, several = [], threading.Event()
    monkeypatch.setattr(module, "BEAT", 0.01)

    def rank(world: Communicator) -> None:
        bcast = world.bcast

        def counted(x: torch.Tensor) -> object:
            heard.append(world.rank)
            if heard.count(1) >= BEATS:
                several.set()
            return bcast(x)

        monkeypatch.setattr(world, "bcast", counted)
        by_rank_0(world, "reporting", lambda: done.append(several.wait(PATIENCE)))

    done: list[bool] = []
    threads.run(2, rank)
    assert done == [True]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_it_is_done_once_on_rank_0_and_before_anybody_goes_on(run, n: int) -> None:
    def rank(world: Communicator) -> list[int]:
        done: list[int] = []
        by_rank_0(world, "reporting", lambda: done.append(world.rank))
        return done

    assert run(n, rank) == [[0], *([[]] * (n - 1))]


@pytest.mark.parametrize("n", [1, 2])
def test_what_it_raises_is_raised_on_all_ranks(run, n: int) -> None:
    def failing() -> None:
        raise UserError("no room")

    def rank(world: Communicator) -> str:
        with pytest.raises(JobError) as error:
            by_rank_0(world, "reporting", failing)
        return str(error.value)

    assert {line.rpartition(": ")[2] for line in run(n, rank)} == {"no room"}
