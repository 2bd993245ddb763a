"""A missing rank leads to `PeerLost` within the timeout; for threads the error names the rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from hpcsgd.comm import Communicator, PeerLost, threads

SHORT = 0.4

COLLECTIVES: dict[str, Callable[[Communicator], object]] = {
    "allreduce": lambda t: t.allreduce(torch.zeros(3)).wait(),
    "alltoall": lambda t: t.alltoall(torch.zeros(3), torch.ones(3)).wait(),
    "bcast": lambda t: t.bcast(torch.zeros(3)).wait(),
    "gather_objects": lambda t: t.gather_objects(None),
    "split": lambda t: t.split(0, 0),
    "composite": lambda t: t.run(lambda: t.allreduce(torch.zeros(3)).wait(), "sendrecv").wait(),
}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_missing_rank_is_named_within_the_timeout(collective: str) -> None:
    started = threading.Barrier(3)  # on a busy machine a thread may start later than SHORT

    def wait_for_rank_one(world: Communicator) -> tuple[tuple[int, ...], str, float] | None:
        world.run(lambda: None, "the thread of the lane begins").wait()
        started.wait(60)
        if world.rank == 1:
            return None
        start = time.perf_counter()
        with pytest.raises(PeerLost) as raised:
            COLLECTIVES[collective](world)
        return raised.value.ranks, str(raised.value), time.perf_counter() - start

    limit = 2 * SHORT
    told = threads.run(3, wait_for_rank_one, timeout=limit)
    assert told[1] is None
    for ranks, message, seconds in filter(None, told):
        assert ranks == (1,)
        assert message.endswith("ranks [1] did not come")
        assert limit * 0.5 <= seconds < limit + 1


def test_a_message_that_never_comes() -> None:
    def wait_for_a_letter(world: Communicator) -> tuple[int, ...]:
        if world.rank == 1:
            return ()
        with pytest.raises(PeerLost, match="no message from 1") as raised:
            world.recv(torch.zeros(1), 1).wait()
        return raised.value.ranks

    assert threads.run(2, wait_for_a_letter, timeout=SHORT)[0] == (1,)


def test_ranks_in_different_operations_hear_of_it() -> None:
    def mixed(world: Communicator) -> None:
        if world.rank == 0:
            world.allreduce(torch.zeros(3)).wait()
        else:
            world.bcast(torch.zeros(3)).wait()

    with pytest.raises(AssertionError, match=r"different operations: \['allreduce sum', 'bcast from 0'\]"):
        threads.run(2, mixed, timeout=5)


def test_the_others_of_a_rank_that_raises_need_not_wait_for_the_timeout() -> None:
    def fail(world: Communicator) -> None:
        if world.rank == 2:
            raise KeyError("the cause")
        world.split(0, 0).barrier()

    start = time.perf_counter()
    with pytest.raises(KeyError, match="the cause"):
        threads.run(3, fail, timeout=30)
    assert time.perf_counter() - start < 5


def test_a_rank_that_came_and_then_failed_is_not_missing():
    """It ended the job before the others had noticed that all ranks had arrived."""
    rendezvous = threads.Rendezvous(2, timeout=5, all_rendezvous=[])
    rendezvous.arrivals[1] = 1
    rendezvous.abort()
    with pytest.raises(PeerLost, match=r"^allgather: a rank ended by an error$") as raised:
        rendezvous.together(0, "allgather", None, list)
    assert raised.value.ranks == ()
