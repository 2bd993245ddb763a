"""Tests of the recorded bytes of every operation, as documented in recording.py, and of phases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hpcsgd.comm import CommStats, Communicator, Work, phase

NUMEL = 8
Operation = Callable[[Communicator, Callable[[int], Tensor]], Work]

# What each operation sends per rank, in elements; `x(m)` makes a tensor of m elements.
SENT: dict[str, tuple[Operation, Callable[[int], float]]] = {
    "alltoall": (lambda t, x: t.alltoall(x(NUMEL), x(NUMEL)), lambda p: (p - 1) / p * NUMEL),
    "reduce_scatter": (
        lambda t, x: t.reduce_scatter(x(NUMEL // t.size), x(NUMEL)),
        lambda p: (p - 1) / p * NUMEL,
    ),
    "allgather": (lambda t, x: t.allgather(x(NUMEL * t.size), x(NUMEL)), lambda p: (p - 1) * NUMEL),
    "allgatherv": (
        lambda t, x: t.allgatherv(x(NUMEL * t.size), x(NUMEL), [NUMEL] * t.size),
        lambda p: (p - 1) * NUMEL,
    ),
    "allreduce": (lambda t, x: t.allreduce(x(NUMEL)), lambda p: 2 * (p - 1) / p * NUMEL),
    "max": (lambda t, x: t.allreduce(x(NUMEL), "max"), lambda p: 2 * (p - 1) / p * NUMEL),
    "bcast": (lambda t, x: t.bcast(x(NUMEL)), lambda p: (p - 1) / p * NUMEL),
    "sendrecv": (
        lambda t, x: t.sendrecv(
            {(t.rank + 1) % t.size: x(NUMEL)}, {(t.rank - 1) % t.size: x(NUMEL)}
        ),
        lambda p: NUMEL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("operation", SENT)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_bytes_are_those_of_the_formula(run, n: int, operation: str, dtype: torch.dtype) -> None:
    call, formula = SENT[operation]

    def record(world: Communicator) -> tuple[int, float, bool]:
        call(world, lambda numel: torch.zeros(numel, dtype=dtype)).wait()
        total = world.stats.totals()["other"]
        return total.calls, total.bytes, total.seconds > 0 and total.waited > 0

    assert run(n, record) == [(1, formula(n) * dtype.itemsize, True)] * n


@pytest.mark.parametrize("n", [2, 4])
def test_of_messages_the_sender_counts_the_bytes(run, n: int) -> None:
    def talk(world: Communicator) -> tuple[int, float]:
        if world.rank == 0:
            world.send(torch.zeros(5), 1).wait()
        elif world.rank == 1:
            world.recv(torch.zeros(5), 0).wait()
        world.gather_objects("not counted in bytes, but called")
        total = world.stats.totals()["other"]
        return total.calls, total.bytes

    assert run(n, talk) == [(2, 20.0), (2, 0.0), *[(1, 0.0)] * (n - 2)]


@pytest.mark.ranks(1)
def test_alone_nothing_is_sent(run) -> None:
    def record(world: Communicator) -> list[float]:
        for call, _ in list(SENT.values())[:-1]:
            call(world, torch.zeros).wait()
        return [total.bytes for total in world.stats.totals().values()]

    assert run(1, record) == [[0.0]]


@pytest.mark.parametrize("n", [2, 4])
def test_split_communicators_share_the_stats_and_separate_ones_too(run, n: int) -> None:
    def record(world: Communicator) -> list[bool]:
        made = [world.split(0, world.rank), world.dup_with_thread()]
        return [comm.stats is world.stats for comm in made]

    assert run(n, record) == [[True, True]] * n


@pytest.mark.parametrize("n", [2, 4])
def test_a_composite_counts_under_the_phase_it_was_submitted_in(run, n: int) -> None:
    def record(world: Communicator) -> dict[str, int]:
        x = torch.zeros(NUMEL)

        def composite() -> None:
            world.allreduce(x).wait()
            with phase("inside"):
                world.allreduce(x).wait()
            world.allreduce(x).wait()

        with phase("outside"):
            work = world.run(composite, "three")
        world.bcast(x).wait()
        work.wait()
        return {name: total.calls for name, total in world.stats.totals().items()}

    assert run(n, record) == [{"outside": 2, "inside": 1, "other": 1}] * n


def test_phases_nest_and_end_with_their_block() -> None:
    stats = CommStats()
    stats.add(calls=1)
    with phase("outer"):
        stats.add(calls=10)
        with pytest.raises(KeyError), phase("inner"):
            stats.add(calls=100)
            raise KeyError
        stats.add(calls=1000)
    stats.add(calls=10000)
    calls = {name: total.calls for name, total in stats.totals().items()}
    assert calls == {"other": 10001, "outer": 1010, "inner": 100}


def test_since_subtracts_and_leaves_out_what_was_idle() -> None:
    stats = CommStats()
    with phase("before"):
        stats.add(calls=1, sent=1, seconds=1, waited=1)
    with phase("both"):
        stats.add(calls=2, sent=10, seconds=0.5, waited=0.25)
    then = stats.totals()
    with phase("both"):
        stats.add(calls=3, sent=7, seconds=2, waited=4)
    with phase("new"):
        stats.add(calls=1, sent=5)
    grown = stats.since(then)
    assert set(grown) == {"both", "new"}
    both = grown["both"]
    assert (both.calls, both.bytes, both.seconds, both.waited) == (3, 7, 2, 4)
    assert grown["new"].bytes == 5
    assert then["both"].calls == 2, "totals() must be a copy"
