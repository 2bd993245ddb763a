"""Tests with more elements than one MPI call takes: reductions in pieces, and counts beyond a C int."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcsgd.comm import Communicator

LIMIT = 2**31


class Spy:
    """An MPI communicator that records the names of the calls made on it."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.comm, name)


@pytest.mark.processes
@pytest.mark.of_mpi  # the only backend that reduces in pieces
@pytest.mark.parametrize("n", [2, 4, 8])
def test_reductions_in_pieces_give_the_whole(run, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcsgd.comm import mpi

    monkeypatch.setattr(mpi, "_LARGEST", 2 * n + 1)
    monkeypatch.setattr(mpi, "_PIECE", 3)

    def reduce(world: Communicator) -> tuple[list[float], list[float], list[int], list[str]]:
        spy = Spy(world.backend.host._comm)  # pyright: ignore[reportAttributeAccessIssue]
        world.backend.host._comm = spy  # pyright: ignore[reportAttributeAccessIssue]
        try:
            x = torch.arange(7 * n) + 100.0 * world.rank
            out = torch.zeros(7)
            world.reduce_scatter(out, x).wait()
            world.allreduce(x).wait()
            largest = torch.arange(7) * (1 if world.rank else -1)
            world.allreduce(largest, "max").wait()
        finally:
            world.backend.host._comm = spy.comm  # pyright: ignore[reportAttributeAccessIssue]
        return out.tolist(), x.tolist(), largest.tolist(), spy.calls

    ranks = 100.0 * n * (n - 1) / 2
    total = [n * i + ranks for i in range(7 * n)]
    for rank, (out, x, largest, calls) in enumerate(run(n, reduce)):
        assert out == total[7 * rank : 7 * rank + 7]
        assert x == total
        assert largest == list(range(7))
        assert calls.count("Ireduce_scatter_block") == 4  # 2, 2, 2 and 1 of the 7 elements
        assert calls.count("Iallreduce") == -(-7 * n // 3) + 3


@pytest.fixture
def wanted(request: pytest.FixtureRequest) -> None:
    if "large" not in (request.config.getoption("-m") or ""):
        pytest.skip("takes up to 9 GiB; give -m large")


@pytest.mark.ranks(2)
@pytest.mark.large
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize("operation", ["bcast", "allgather", "alltoall", "allreduce", "sendrecv"])
def test_more_elements_than_an_int_counts(run, operation: str) -> None:
    """With one byte per element, each rank holds 2 to 4.5 GiB."""

    def move(world: Communicator) -> bool:
        other = 1 - world.rank
        if operation == "bcast":
            x = torch.full((LIMIT + 5,), world.rank, dtype=torch.uint8)
            world.bcast(x, 1).wait()
            return bool((x == 1).all())
        if operation == "allreduce":
            x = torch.full((LIMIT + 5,), world.rank, dtype=torch.uint8)
            x[-1] = 7 * other
            world.allreduce(x, "max").wait()
            return bool((x[:-1] == 1).all()) and x[-1].item() == 7
        if operation == "allgather":
            out = torch.zeros(2, LIMIT + 5, dtype=torch.uint8)
            out[world.rank] = world.rank + 1
            world.allgather(out, out[world.rank]).wait()
            return bool((out[0] == 1).all() and (out[1] == 2).all())
        if operation == "sendrecv":
            x, out = (torch.full((LIMIT + 5,), value, dtype=torch.uint8) for value in (world.rank, 9))
            world.sendrecv({other: x}, {other: out}).wait()
            return bool((out == other).all())
        x = torch.full((2, LIMIT // 2 + 5), world.rank, dtype=torch.uint8)
        x[other] += 10
        out = torch.empty_like(x)
        world.alltoall(out, x).wait()
        return bool((out[world.rank] == world.rank).all() and (out[other] == other + 10).all())

    assert run(2, move) == [True, True]
