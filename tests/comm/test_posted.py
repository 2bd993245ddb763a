"""Tests of records that a thread posts directly, whatever its communication thread is doing."""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hpcsgd.comm import Communicator, Deadlock, PeerLost, rank_watch, threads
from hpcsgd.comm.posted import Posted
from hpcsgd.comm.rank_watch import ThreadState

LIMIT = 60.0  # seconds; the machine may be busy


@pytest.mark.ranks(3)
def test_each_rank_gets_all_in_rank_order(run) -> None:
    def body(world: Communicator) -> list[bytes]:
        ranks = world.control
        return [ranks.post_record(bytes([world.rank, n])).wait() for n in range(3)]

    for told in run(3, body):
        assert told == [bytes([0, n, 1, n, 2, n]) for n in range(3)]


@pytest.mark.ranks(2)
def test_a_comm_thread_that_is_busy_delays_nothing(run) -> None:
    def body(world: Communicator) -> bytes:
        ranks = world.control
        over = threading.Event()
        busy = world.run(lambda: over.wait(LIMIT), "a long call")
        try:
            return ranks.post_record(bytes([world.rank])).wait()
        finally:
            assert not busy.done()
            over.set()
            assert busy.wait()

    assert list(run(2, body)) == [bytes([0, 1])] * 2


@pytest.mark.ranks(2)
def test_work_that_is_posted_is_done_when_the_last_rank_has_posted(run) -> None:
    def body(world: Communicator) -> list[bool]:
        ranks = world.control
        if world.rank == 1:
            world.barrier()
            return [ranks.post_record(b"b").wait() == b"ab"]
        work = ranks.post_record(b"a")
        before = work.done()
        world.barrier()
        return [not before, work.wait() == b"ab", work.done(), work.wait() == b"ab"]

    assert all(all(told) for told in run(2, body))


@pytest.mark.ranks(2)
def test_the_next_one_is_not_taken_for_one_that_nobody_has_waited_for(run) -> None:
    def body(world: Communicator) -> bytes:
        ranks = world.control
        if world.rank == 0:
            ranks.post_record(b"a")
            gc.collect()
            world.barrier()
        else:
            world.barrier()
            ranks.post_record(b"b")
        return ranks.post_record(bytes([world.rank])).wait()

    assert list(run(2, body)) == [bytes([0, 1])] * 2


@pytest.mark.ranks(2)
def test_memory_that_mpi_still_writes_into_is_kept(run) -> None:
    """This holds even if, after an exception, nothing refers to the record or its communicator any more."""

    def body(world: Communicator) -> tuple[bool, bool]:
        backend, received = world.control.backend, bytearray(2)
        alone = sys.getrefcount(received)
        if world.rank == 0:
            backend.post_record(b"a", received)
            gc.collect()
            kept = sys.getrefcount(received) > alone
            world.barrier()
        else:
            world.barrier()
            kept = backend.post_record(b"b", received)(LIMIT)
        world.barrier()
        return kept or world.backend.name == "threads", world.control.post_record(b"c").wait() == b"cc"

    assert list(run(2, body)) == [(True, True)] * 2


def test_a_rank_that_does_not_come_is_lost_after_the_timeout() -> None:
    def body(world: Communicator) -> None:
        ranks = world.control
        if world.rank == 1:
            over.wait(LIMIT)
            return
        with pytest.raises(PeerLost, match=r"allgather over 2 ranks: no answer within 0\.3 s"):
            ranks.post_record(b"a").wait()
        over.set()

    over = threading.Event()
    threads.run(2, body, timeout=0.3)


def test_a_rank_that_fails_ends_the_wait_of_the_others() -> None:
    def body(world: Communicator) -> None:
        ranks = world.control
        if world.rank == 1:
            raise ZeroDivisionError
        ranks.post_record(b"a").wait()

    with pytest.raises(ZeroDivisionError):
        threads.run(2, body, timeout=LIMIT)


def test_ranks_that_miss_each_other_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank waits for the record that it has posted, the other one in a collective operation."""
    monkeypatch.setattr(rank_watch, "PATIENCE", 0.05)
    monkeypatch.setattr(rank_watch, "LOOK", 0.02)

    def body(world: Communicator) -> None:
        ranks = world.control
        if world.rank == 0:
            ranks.post_record(b"a").wait()
        else:
            world.allreduce(torch.ones(1)).wait()

    with pytest.raises(Deadlock, match="rank 0 is in allgather over 2 ranks, rank 1 in allreduce"):
        threads.run(2, body, timeout=LIMIT)


def test_what_is_posted_and_not_awaited_is_no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All records have arrived, but the ranks wait for each other in collective operations."""
    monkeypatch.setattr(rank_watch, "PATIENCE", 0.05)
    monkeypatch.setattr(rank_watch, "LOOK", 0.02)

    def body(world: Communicator) -> None:
        one, other = world.split(0, world.rank), world.split(0, world.rank)
        work = world.control.post_record(b"a")
        (one if world.rank == 0 else other).allreduce(torch.ones(1)).wait()
        work.wait()

    with pytest.raises(Deadlock, match="ranks 0 and 1 are in allreduce over 2 ranks"):
        threads.run(2, body, timeout=2.0)


def test_the_thread_that_waits_and_one_that_watches_it_find_the_end_together() -> None:
    both = threading.Barrier(2)

    def ends(seconds: float) -> bool:
        both.wait(LIMIT)
        return True

    posted = Posted(ends, bytearray(b"ab"), ThreadState(), None)
    with ThreadPoolExecutor(2) as threads_of_one_rank:
        watching = threads_of_one_rank.submit(posted.done)
        waiting = threads_of_one_rank.submit(posted.result)
        assert waiting.result() == (b"ab", None)
        assert watching.result()
