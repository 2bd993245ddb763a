"""Tests of faults injected at a given rank and step."""

from __future__ import annotations

import threading

import pytest
import torch

from hpcsgd.comm import Communicator, PeerLost, threads
from hpcsgd.comm.failing import FailingBackend, Faults


def broken() -> None:
    raise OSError("the link is down")


def steps(world: Communicator, faults: Faults, count: int = 4) -> int:
    group = world.split(0, -world.rank)
    for t in range(count):
        faults.step[world.rank] = t
        group.allreduce(torch.ones(1)).wait()
    return count


def test_it_happens_at_that_step_of_that_rank_only() -> None:
    """This also holds in a split communicator, where the rank has another number."""
    faults, reached = Faults().at(1, 2, broken), {}

    def training(world: Communicator) -> None:
        try:
            steps(world, faults)
        except OSError as error:
            reached[world.rank] = (faults.step[world.rank], str(error))
            raise
        except PeerLost:
            pass

    with pytest.raises(OSError, match="the link is down"):
        threads.run(3, training, wrap=lambda inner: FailingBackend(inner, faults), timeout=10)
    assert reached == {1: (2, "the link is down")}


def test_it_happens_once() -> None:
    faults, failed = Faults().at(0, 1, broken), []

    def training(world: Communicator) -> int:
        for t in range(3):
            faults.step[world.rank] = t
            try:
                world.allreduce(torch.ones(1)).wait()
            except OSError:
                failed.append(t)
                world.allreduce(torch.ones(1)).wait()
        return 3

    assert threads.run(2, training, wrap=lambda inner: FailingBackend(inner, faults)) == [3, 3]
    assert failed == [1]


def _until(event: threading.Event) -> None:
    assert event.wait(20)


def test_a_frozen_rank_is_missed_by_the_others() -> None:
    thaw = threading.Event()
    missed_by_both = threading.Barrier(2, action=thaw.set, timeout=10)
    faults = Faults().at(2, 1, lambda: _until(thaw))

    def training(world: Communicator) -> tuple[int, ...]:
        with pytest.raises(PeerLost) as raised:
            steps(world, faults)
        if world.rank != 2:
            missed_by_both.wait()
        return raised.value.ranks

    told = threads.run(3, training, wrap=lambda inner: FailingBackend(inner, faults), timeout=0.3)
    assert told[:2] == [(0,), (0,)], "world rank 2 is rank 0 where they met"


def test_without_faults_everything_passes_through() -> None:
    faults = Faults()

    def everything(world: Communicator) -> list[float]:
        size = world.size
        x, out = torch.arange(2.0) + world.rank, torch.zeros(2)
        results = []
        world.alltoall(out, x).wait()
        results.append(out.tolist())
        world.reduce_scatter(out[:1], x).wait()
        world.allgather(out, x[:1]).wait()
        results.append(out.tolist())
        world.allgatherv(out, x[1:], [1, 1]).wait()
        results.append(out.tolist())
        world.bcast(x, 1).wait()
        results.append(x.tolist())
        other = 1 - world.rank
        world.sendrecv({other: x + world.rank}, {other: out}).wait()
        results.append(out.tolist())
        if world.rank == 0:
            world.send(torch.tensor([5.0]), 1).wait()
        else:
            assert world.recv(out[:1]).wait() == 0
        results.append(out.tolist())
        results.append(world.gather_objects(size))
        return results

    wrapped = threads.run(2, everything, wrap=lambda inner: FailingBackend(inner, faults))
    assert wrapped == threads.run(2, everything)
