"""Tests of collectives in two levels, whose sums are over the ranks of a node and then over nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcsgd.comm import Backend, Communicator, by_node
from hpcsgd.comm.by_node import ByNode, levels

Run = Callable[..., list[Any]]
SHAPES = {4: [(2, 2)], 8: [(2, 4), (4, 2)]}
CASES = [(n, H, L) for n, shapes in SHAPES.items() for H, L in shapes]


def brought(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (1000 * torch.randn(count, generator=torch.Generator().manual_seed(rank))).to(dtype)


def added(n: int, H: int, L: int, count: int) -> np.ndarray[Any, Any]:
    """Return the sum of all ranks' vectors, computed one by one in each node, and then over the nodes."""
    xs = np.stack([brought(rank, n * count).numpy() for rank in range(n)]).reshape(H, L, n, count)
    of_node = xs[:, 0]
    for place in range(1, L):
        of_node = of_node + xs[:, place]
    total = of_node[0]
    for node in range(1, H):
        total = total + of_node[node]
    return total


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([0, 0, 2, 2], (2, 2)),
        ([0, 0, 0, 3, 3, 3, 6, 6, 6], (3, 3)),
        ([0, 0, 0, 0], None),
        ([0, 1, 2, 3], None),
        ([0, 0, 0, 3], None),
        ([0, 2, 0, 2], None),
        ([0, 0, 2], None),
        ([0, 0, 3, 3, 3], None),
        ([0], None),
    ],
)
def test_runs_of_as_many_ranks_are_levels(nodes: list[int], expected: tuple[int, int] | None) -> None:
    assert levels(nodes) == expected


@pytest.mark.parametrize(("n", "H", "L"), CASES)
@pytest.mark.parametrize("count", [1, 97])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_all_runs_are_gathered(
    run: Run, n: int, H: int, L: int, count: int, dtype: torch.dtype, in_place: bool
) -> None:
    def gathered(world: Communicator) -> Tensor:
        out = torch.zeros(n * count, dtype=dtype)
        x = out.view(n, -1)[world.rank] if in_place else torch.zeros(count, dtype=dtype)
        x.copy_(brought(world.rank, count, dtype))
        ByNode(world.backend, H, L).allgather(out, x)
        return out

    expected = torch.cat([brought(rank, count, dtype) for rank in range(n)])
    assert all(torch.equal(mine, expected) for mine in run(n, gathered))


@pytest.mark.parametrize(("n", "H", "L"), CASES)
@pytest.mark.parametrize("count", [1, 97])
@pytest.mark.parametrize("mean", [False, True])
def test_sums_are_of_the_node_and_then_of_all(
    run: Run, n: int, H: int, L: int, count: int, mean: bool
) -> None:
    def scattered(world: Communicator) -> Tensor:
        out = torch.full((count,), torch.nan)
        ByNode(world.backend, H, L).reduce_scatter(out, brought(world.rank, n * count), mean)
        return out

    expected = added(n, H, L, count) / (np.float32(n) if mean else np.float32(1))
    found = run(n, scattered)
    assert np.array_equal(torch.stack(found).numpy(), expected)


@pytest.mark.processes
@pytest.mark.of_mpi
@pytest.mark.ranks(4)
@pytest.mark.parametrize("over", [True, False])
def test_long_vectors_of_ranks_that_share_nodes_go_so(run: Run, over: bool) -> None:
    """Only long vectors are reduced in two levels. MPI adds up shorter ones, in the library's own order.

    A library may add in the order of the two levels by itself, so the calls are counted as well.
    """
    count = by_node.SHORTEST // 16 - (not over)

    def found(world: Communicator) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        backend, of_one_node = with_nodes([0, 0, 2, 2]), with_nodes([0, 0, 0, 0])
        out, x = torch.empty(count), brought(world.rank, 4 * count)
        whole, by_mpi = torch.empty(4 * count), torch.empty(count)
        with counted("reduce_scatter") as reductions, counted("allgather") as gathers:
            backend.reduce_scatter(out, x, "sum")
            backend.allgather(whole, out)
        of_one_node.reduce_scatter(by_mpi, x, "sum")
        return out, whole, by_mpi, [reductions.call_count, gathers.call_count]

    ranks = run(4, found)
    sums = torch.stack([out for out, *_ in ranks])
    assert [calls for *_, calls in ranks] == [[over, over]] * 4
    assert all(torch.equal(whole.view(4, -1), sums) for _, whole, *_ in ranks)
    in_two_levels = added(4, 2, 2, count)
    expected = in_two_levels if over else torch.stack([by_mpi for *_, by_mpi, _ in ranks]).numpy()
    assert np.array_equal(sums.numpy(), expected)
    np.testing.assert_allclose(sums.numpy(), in_two_levels, rtol=1e-4, atol=1e-2)


def counted(name: str) -> Any:
    """Return a context that counts the calls of a collective in two levels."""
    return mock.patch.object(ByNode, name, autospec=True, side_effect=getattr(ByNode, name))


def with_nodes(nodes: Sequence[int]) -> Backend:
    """Return a communicator of the existing processes, in which rank r is on `nodes[r]`."""
    from mpi4py import MPI

    from hpcsgd.comm.mpi import MpiBackend

    return MpiBackend(MPI.COMM_WORLD.Dup(), nodes)
