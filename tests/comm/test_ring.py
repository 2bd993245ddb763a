"""Tests of the ring reduction: it uses messages only, and gives the same bits on every rank."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcsgd.comm import Communicator, ring

PATIENCE = 60.0  # seconds; the machine may be busy


class Post:
    """Messages between threads.

    A buffer has at most one message to receive at a time, and it must not overlap with what is being sent.
    """

    def __init__(self, rank: int, size: int, boxes: dict[tuple[int, int], queue.Queue[Tensor]]) -> None:
        self.rank, self.size, self._boxes = rank, size, boxes
        self._rooms: set[int] = set()
        self.sending: list[tuple[int, int]] = []
        """Address ranges that the library may still read."""

    def post_send(self, x: Tensor, to: int) -> Callable[[], object]:
        self._boxes[self.rank, to].put(x.clone())
        self.sending.append(addresses(x))
        return lambda: self.sending.remove(addresses(x))

    def post_recv(self, out: Tensor, source: int) -> Callable[[], object]:
        assert not out.numel() or out.data_ptr() not in self._rooms
        low, high = addresses(out)
        assert not any(start < high and low < stop for start, stop in self.sending)
        self._rooms.add(out.data_ptr())
        out.fill_(torch.nan)  # the buffer may be written at any time from now on

        def received() -> None:
            out.copy_(self._boxes[source, self.rank].get(timeout=PATIENCE))
            self._rooms.discard(out.data_ptr())

        return received

    def complete(self, request: Callable[[], object]) -> None:
        request()


def addresses(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + x.nbytes


def around(xs: list[Tensor], mean: bool) -> None:
    P = len(xs)
    boxes = {(i, j): queue.Queue[Tensor]() for i in range(P) for j in range(P)}
    ranks = [
        threading.Thread(target=ring.allreduce, args=(Post(rank, P, boxes), x, mean), daemon=True)
        for rank, x in enumerate(xs)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize("P", [2, 3, 4, 7])
@pytest.mark.parametrize("M", [1, 3, 97, 1009])
@pytest.mark.parametrize("segment", [5, 64, 10_000])
@pytest.mark.parametrize("mean", [True, False])
def test_all_have_the_same_sum(P: int, M: int, segment: int, mean: bool, monkeypatch) -> None:
    monkeypatch.setattr(ring, "SEGMENT", segment)
    generator = np.random.default_rng(P * M)
    given = generator.normal(size=(P, M)).astype(np.float32)
    xs = [torch.from_numpy(row.copy()) for row in given]
    around(xs, mean)
    assert all(torch.equal(x, xs[0]) for x in xs)
    expected = given.astype(np.float64).mean(0) if mean else given.astype(np.float64).sum(0)
    np.testing.assert_allclose(xs[0].numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.processes
@pytest.mark.ranks(4)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_by_way_of_mpi(run, size: int, dtype: torch.dtype, monkeypatch) -> None:
    """The ring is used as between nodes, for several reductions in a row; short ones are left to MPI."""
    monkeypatch.setattr(ring, "SEGMENT", 100)
    monkeypatch.setattr(ring, "SHORTEST", 50)

    def average(world: Communicator) -> list[Tensor]:
        ranks = world.split(int(world.rank < size), world.rank)
        if world.rank >= size:
            return []
        ranks.backend.host._one_a_node = True  # type: ignore[attr-defined]
        xs = [torch.arange(n, dtype=dtype) * (i + 1) + world.rank for i, n in enumerate((1009, 10, 4001))]
        for work in [ranks.allreduce(x, "mean") for x in xs]:
            work.wait()
        return xs

    for found in run(4, average)[:size]:
        for i, x in enumerate(found):
            expected = torch.arange(len(x), dtype=dtype) * (i + 1) + (size - 1) / 2
            torch.testing.assert_close(x, expected)


def test_short_vectors_are_left_to_the_library() -> None:
    assert ring.is_long(torch.empty(4 * ring.SHORTEST), 4)
    assert not ring.is_long(torch.empty(4 * ring.SHORTEST), 5)
