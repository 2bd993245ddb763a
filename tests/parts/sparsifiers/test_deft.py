"""DEFT's parts: properties that hold for any layers, and the paper's algorithms."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcsgd import kernels
from hpcsgd.comm import Communicator
from hpcsgd.errors import UserError
from hpcsgd.parts.sparsifiers import Accumulated, CLTk, Deft, TopK
from hpcsgd.parts.sparsifiers.deft import allocate, assign, partition
from sparsifying import packed, shares

SIZES = st.lists(st.integers(1, 200), min_size=1, max_size=12)
NORMS = st.one_of(st.just(0.0), st.floats(1e-30, 1e30), st.sampled_from([1.0, 2.0]))


def bounds(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


@given(SIZES, st.integers(1, 64))
def test_partition_covers_everything_in_pieces_that_are_alike(sizes: list[int], n: int) -> None:
    layers = bounds(sizes)
    cut = partition(layers, n)
    assert set(layers.tolist()) <= set(cut.tolist())
    assert (cut.diff() > 0).all()
    for start, stop in itertools.pairwise(layers):
        pieces = cut[(cut >= start) & (cut <= stop)].diff()
        assert pieces.max() - pieces.min() <= 1
        assert (stop - start) / len(pieces) <= max(1, sum(sizes) / n)
        assert len(pieces) == 1 or (stop - start) / (len(pieces) - 1) > sum(sizes) / n, "no more than needed"


@given(st.data(), SIZES)
def test_all_of_k_is_assigned(data: st.DataObject, sizes: list[int]) -> None:
    norms = [data.draw(NORMS) for _ in sizes]
    k = data.draw(st.integers(1, sum(sizes)))
    given_out = assign(norms, sizes, k)
    assert sum(given_out) == k
    assert all(0 <= each <= size for each, size in zip(given_out, sizes, strict=True))


@given(st.data(), SIZES)
def test_assigned_as_by_algorithm_3(data: st.DataObject, sizes: list[int]) -> None:
    norms = [float(data.draw(st.integers(0, 50))) for _ in sizes]  # whole numbers have exact sums
    k = data.draw(st.integers(1, sum(sizes)))
    assert assign(norms, sizes, k) == shares(norms, sizes, k)


@given(st.data(), SIZES, st.integers(1, 20), st.integers(0, 3))
def test_the_native_library_shares_out_the_same(
    data: st.DataObject, sizes: list[int], n: int, floor: int
) -> None:
    library = kernels.native()
    if library is None:
        pytest.skip("no native kernels were built")
    norms = [data.draw(st.one_of(NORMS, st.sampled_from([math.nan, math.inf]))) for _ in sizes]
    k = data.draw(st.integers(1, sum(sizes)))
    squared = torch.tensor(norms, dtype=torch.float64).square()
    ks, bins = library.share_out(squared, bounds(sizes), k, floor, n)
    assert ks.tolist() == assign(squared.sqrt().tolist(), sizes, k, floor)
    assert bins.tolist() == allocate(sizes, ks.tolist(), n)


def test_larger_norms_get_more() -> None:
    assert assign([1.0, 4.0, 3.0], [100, 100, 100], 16) == [2, 8, 6]
    assert assign([1.0, 4.0, 3.0], [100, 5, 100], 16) == [3, 5, 8], "what a layer cannot hold goes on"
    assert assign([0.0, 1.0, 0.0], [100, 3, 2], 8) == [3, 3, 2], "layers without a norm, after others"
    assert assign([1.0] * 5, [7] * 5, 3) in ([1, 0, 1, 0, 1], [1, 1, 0, 1, 0], [1, 0, 1, 1, 0])
    assert assign([1.0, math.nan, math.inf, 2.0], [9] * 4, 9) == [0, 4, 5, 0], "what is no number, first"


def test_a_floor_for_every_layer() -> None:
    assert assign([1000.0, 1.0, 1.0], [100, 100, 1], 10, floor=2) == [10, 2, 1]


@given(st.data(), SIZES, st.integers(1, 16))
def test_allocated_by_longest_processing_time(data: st.DataObject, sizes: list[int], n: int) -> None:
    k = [data.draw(st.integers(0, size)) for size in sizes]
    bins = allocate(sizes, k, n)
    assert set(bins) <= set(range(n))
    costs = [size * max(1, math.log2(each)) if each else 0 for size, each in zip(sizes, k, strict=True)]
    loads = [sum(c for c, b in zip(costs, bins, strict=True) if b == each) for each in range(n)]
    assert max(loads) <= sum(costs) / n + (1 - 1 / n) * max(costs) + 1e-9, "Graham's bound"
    theirs = packed(sizes, k, n)
    assert max(loads) == pytest.approx(max(sum(costs[i] for i in b) for b in theirs))


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("exact", [False, True])
def test_workers_select_disjoint_sets(run, n: int, exact: bool) -> None:
    sizes, M, k = [5, 300, 40, 1, 154], 500, 50

    def select(world: Communicator) -> list[list[int]]:
        acc = torch.randn(M, generator=torch.Generator().manual_seed(7), dtype=torch.float32)
        acc += 0.1 * torch.randn(M, generator=torch.Generator().manual_seed(world.rank))
        deft = Deft(k / M, exact=exact)
        cut = deft.cut(bounds(sizes), n)
        norms = torch.stack([part.square().sum().double() for part in acc.split(cut.diff().tolist())])
        x = Accumulated(acc, cut, norms)
        return [deft.select(x, deft.share(x, t, world)).tolist() for t in range(3)]

    for selections in zip(*run(n, select), strict=True):
        together = [i for mine in selections for i in mine]
        assert all(mine == sorted(mine) for mine in selections)
        assert len(set(together)) == len(together)
        assert len(together) == k if exact or n == 1 else abs(len(together) - k) <= 5


@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_layer_comes_to_each_worker_whoever_decides(run, n: int) -> None:
    """However different the workers' norms are, it comes n times in n² steps: once in every worker's bins."""
    sizes = [50, 60, 70, 80, 90, 100, 110]

    def visits(world: Communicator) -> list[list[int]]:
        cut = bounds(sizes)
        norms = torch.rand(len(sizes), generator=torch.Generator().manual_seed(world.rank)).double()
        x = Accumulated(torch.zeros(sum(sizes)), cut, norms)
        shares = [Deft(0.5).share(x, t, world) for t in range(n * n)]
        return [[share.starts.tolist().count(start) for start in cut[:-1].tolist()] for share in shares]

    for mine in run(n, visits):
        assert [sum(counts) for counts in zip(*mine, strict=True)] == [n] * len(sizes)


@pytest.mark.ranks(1)
def test_on_one_worker_with_one_layer_all_are_top_k(run) -> None:
    def select(world: Communicator) -> list[list[int]]:
        acc = torch.randn(1000, generator=torch.Generator().manual_seed(3))
        x = Accumulated(acc, torch.tensor([0, 1000]), acc.square().sum().double().reshape(1))
        return [s.select(x, s.share(x, 5, world)).tolist() for s in (TopK(0.05), CLTk(0.05), Deft(0.05))]

    ((top, cyclic, deft),) = run(1, select)
    assert top == cyclic == deft
    assert len(top) == 50


@pytest.mark.parametrize("density", [0, -0.1, 1.5, math.nan])
def test_bad_densities(density: float) -> None:
    for kind in (TopK, CLTk, Deft):
        with pytest.raises(UserError, match=r"share of elements to send|density = nan: expected a number"):
            kind(density)


def test_a_bad_floor() -> None:
    with pytest.raises(UserError, match="floor = -1: a number of elements of each layer"):
        Deft(0.1, floor=-1)
