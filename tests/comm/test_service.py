"""Tests of requests that other ranks answer on a thread of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from hpcsgd.comm import Communicator, PeerLost, RequestServer, threads

LARGE = 2_000_000  # bytes: more than MPI sends before the receiver is ready


def filled(value: int, size: int = LARGE) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_everybody_asks_everybody_at_once(run, n: int) -> None:
    def work(world: Communicator) -> bool:
        def answer(source: int, question: Tensor) -> Iterable[tuple[int, Tensor]]:
            assert (question == source).all()
            return [(source, question + 100)]

        service = RequestServer(world, answer, LARGE)
        room = {rank: filled(0) for rank in range(n)}
        for _ in range(5):
            service.ask({rank: filled(world.rank) for rank in range(n)}, room).wait()
        return all(bool((x == 100 + world.rank).all()) for x in room.values())

    assert all(run(n, work))


@pytest.mark.parametrize("n", [2, 4])
def test_answers_that_wait_for_others(run, n: int) -> None:
    """Rank 0 answers after all requests have arrived, in the reverse order."""

    def work(world: Communicator) -> int:
        asked: list[int] = []

        def answer(source: int, _: Tensor) -> Iterable[tuple[int, Tensor]]:
            asked.append(source)
            return [(rank, filled(len(asked), 8)) for rank in reversed(asked)] if len(asked) == n else []

        service = RequestServer(world, answer, 8)
        room = filled(0, 8)
        service.ask({0: filled(1, 8)}, {0: room}).wait()
        return int(room[0])

    assert run(n, work) == [n] * n


@pytest.mark.parametrize("n", [2, 4])
def test_answers_while_the_owner_computes_and_after_it_is_done(run, n: int) -> None:
    def work(world: Communicator) -> float:
        service = RequestServer(world, lambda source, question: [(source, question)], 8)
        world.barrier()
        if world.rank > 0:  # rank 0 finishes at once
            time.sleep(0.3)
        start = time.perf_counter()
        others = [rank for rank in range(n) if rank != world.rank]
        if world.rank > 0:
            service.ask(
                {rank: filled(1, 8) for rank in others}, {rank: filled(0, 8) for rank in others}
            ).wait()
        took = time.perf_counter() - start
        time.sleep(0.5 if world.rank == 1 else 0.0)
        return took

    assert max(run(n, work)) < 0.4


@pytest.mark.parametrize("n", [2, 4])
def test_nothing_is_left_running(run, n: int) -> None:
    def work(world: Communicator) -> tuple[bool, list[str]]:
        before = threading.enumerate()  # servers of other tests may still be shutting down
        service = RequestServer(world, lambda source, question: [(source, question)], 8)
        service.ask({world.rank: filled(1, 8)}, {world.rank: filled(0, 8)}).wait()
        ended = world.close_dups(60.0)
        own = {t.name for t in threading.enumerate() if t not in before}
        return ended, sorted(own & {f"server of rank {world.rank}"})

    assert run(n, work) == [(True, [])] * n


@pytest.mark.parametrize("n", [2, 4])
def test_at_rest_nobody_asks(run, n: int) -> None:
    """A rank that finishes the block first must not disturb those that are still in it."""

    def work(world: Communicator) -> list[bool]:
        asked: list[int] = []

        def answer(source: int, question: Tensor) -> Iterable[tuple[int, Tensor]]:
            asked.append(source)
            return [(source, question)]

        service = RequestServer(world, answer, 8)
        calm = []
        for turn in range(5):
            room = {rank: filled(0, 8) for rank in range(n)}
            service.ask({rank: filled(1, 8) for rank in range(n)}, room).wait()
            with service.at_rest():
                before = list(asked)
                time.sleep(0.02 if turn % n == world.rank else 0.0)
                calm.append(asked == before and len(asked) == n * (turn + 1))
        return calm

    assert run(n, work) == [[True] * 5] * n


@pytest.mark.parametrize("n", [2])
def test_bytes_to_oneself_do_not_count(run, n: int) -> None:
    def work(world: Communicator) -> float:
        service = RequestServer(world, lambda source, question: [(source, question)], 8)
        before = world.stats.totals()
        room = {rank: filled(0, 8) for rank in range(n)}
        service.ask({rank: filled(1, 8) for rank in range(n)}, room).wait()
        with service.at_rest():
            pass
        return sum(total.bytes for total in world.stats.since(before).values())

    meetings = 2 * 4 * 2 * (n - 1) / n  # two allreduces of one float32
    assert run(n, work) == [2 * 8 * (n - 1) + meetings] * n


@pytest.mark.slow
def test_who_does_not_come_to_the_farewell_is_missed() -> None:
    def work(world: Communicator) -> None:
        RequestServer(world, lambda source, question: [(source, question)], 8)
        if world.rank == 1:
            time.sleep(2.5)

    with pytest.raises(PeerLost):
        threads.run(2, work, timeout=1.0)
