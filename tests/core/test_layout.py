"""Tests of the assignment of whole tensors: one owner each, about equal shares, and little padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpcsgd.core import layout
from hpcsgd.core.flat import flatten
from hpcsgd.core.layout import EMPTY, Layout, assign, bucket_bytes, cost, cut, nbytes
from hpcsgd.engine.muon import hidden_matrices
from hpcsgd.models.gpt import gpt

shapes = st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=9)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 4))
def test_the_busiest_has_not_much_more_than_at_best(costs: list[int], K: int) -> None:
    """Graham's bound holds; the best assignment is found by trying all."""
    hands = assign(costs, K)
    assert sorted(i for hand in hands for i in hand) == list(range(len(costs)))
    busiest = max(sum(costs[i] for i in hand) for hand in hands)
    best = min(
        max(sum(c for c, j in zip(costs, owners, strict=True) if j == k) for k in range(K))
        for owners in itertools.product(range(K), repeat=len(costs))
    )
    assert busiest <= (4 / 3 - 1 / (3 * K)) * best + 1e-9


def test_the_costliest_come_first() -> None:
    assert assign([1, 1, 1, 1, 1, 1, 6], 2) == [[6], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("shape", "expected"), [((), 1), ((7,), 7), ((3, 5), 45), ((5, 3), 45), ((4, 3, 2), 96), ((2, 8), 32)]
)
def test_a_matrix_costs_its_products(shape: tuple[int, ...], expected: int) -> None:
    assert cost(torch.Size(shape)) == expected


@given(shapes, st.integers(1, 5), st.sampled_from([0.0, 100.0, 1e9]))
def test_every_tensor_has_one_owner(kinds: list[tuple[int, ...]], K: int, bucket_bytes: float) -> None:
    """Values do not change, and tensors that may be cut are owned element by element."""
    owners: dict[str, list[int]] = {}
    owned: dict[str, list[int]] = {}
    for j in range(K):
        named = [
            (f"p{i}", nn.Parameter(torch.arange(1.0, 1 + torch.Size(s).numel()).view(s)))
            for i, s in enumerate(kinds)
        ]
        whole = {p for _, p in named if p.dim() >= 2}
        before = [p.detach().clone() for _, p in named]
        for bucket in flatten(named, K, j, bucket_bytes, whole):
            assert bucket.size % K == 0
            assert {slot.param in whole for slot in bucket.slots} == {bucket.whole}
            assert [slot.start for slot in bucket.slots] == sorted(slot.start for slot in bucket.slots)
            for piece in bucket.ranges:
                owned.setdefault(piece.slot.name, []).extend(range(piece.start, piece.stop))
                if bucket.whole:
                    owners.setdefault(piece.slot.name, []).append(j)
                mine = bucket.param_shard[piece.offset : piece.offset + piece.stop - piece.start]
                assert torch.equal(mine, piece.slot.param.detach().reshape(-1)[piece.start : piece.stop])
        assert all(torch.equal(x, p.detach()) for x, (_, p) in zip(before, named, strict=True))
    assert all(len(found) == 1 for found in owners.values())
    assert len(owners) == sum(len(s) >= 2 for s in kinds)
    for i, s in enumerate(kinds):
        assert sorted(owned[f"p{i}"]) == list(range(torch.Size(s).numel()))


def laid_out(preset: str | None, K: int) -> tuple[list[Layout], list[Layout]]:
    """Return the buckets of whole matrices, and the other buckets."""
    with torch.device("meta"):
        net = gpt(50_257, preset)
    found = cut(net.named_parameters(), K, 4e6, set(hidden_matrices(net)))
    return [x for x in found if x.whole], [x for x in found if not x.whole]


def padding(layouts: list[Layout]) -> float:
    return 1 - sum(s.stop - s.start for x in layouts for s in x.slots) / sum(x.size for x in layouts)


@pytest.mark.parametrize("preset", [None, "small", "medium"])
@pytest.mark.parametrize("K", [2, 3, 4, 8])
def test_presets_of_gpt_have_no_padding(preset: str | None, K: int) -> None:
    """The exception is the smallest one, with four layers for eight ranks."""
    matrices, _ = laid_out(preset, K)
    assert padding(matrices) == (pytest.approx(1 / 7) if (preset, K) == (None, 8) else 0)


@pytest.mark.parametrize(("K", "buckets"), [(2, 18), (4, 9), (8, 2)])
def test_buckets_are_several_and_ready_one_after_the_other(K: int, buckets: int) -> None:
    matrices, others = laid_out("small", K)
    assert len(matrices) == buckets
    for layouts in (matrices, matrices + others):
        ready = [min(slot.number for slot in x.slots) for x in layouts]
        assert layouts is not matrices or ready == sorted(ready, reverse=True)


def test_a_bucket_grows_until_it_is_well_filled() -> None:
    """If the last bucket would not be well filled, it is merged with those before it."""
    sizes = [4, 4, 4, 2, 2, 2, 2, 4, 8, 8]
    named = [(f"p{i}", nn.Parameter(torch.zeros(n, n))) for i, n in enumerate(sizes)]
    found = cut(named, 2, 0.0, {p for _, p in named})
    assert [{slot.name for slot in x.slots} for x in found] == [{"p9", "p8"}, {f"p{i}" for i in range(8)}]
    assert all(x.size - sum(s.stop - s.start for s in x.slots) <= EMPTY * x.size for x in found)


@pytest.mark.parametrize(
    ("model", "said", "bucket"), [(1, None, 1), (24, None, 1.5), (1000, None, 4), (24, 7, 7 * 2**20 / 1e6)]
)
def test_a_bucket_is_a_small_part_of_the_model(model: float, said: float | None, bucket: float) -> None:
    assert bucket_bytes(model * 1e6, said) == bucket * 1e6


def test_the_work_grows_with_the_number_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not grow with the square of the number, as a model may have 10,000 small tensors."""
    looks = 0

    def counted(params: Iterable[nn.Parameter]) -> int:
        nonlocal looks
        some = list(params)
        looks += len(some)
        return nbytes(some)

    monkeypatch.setattr(layout, "nbytes", counted)
    (one,) = cut([(f"p{i}", nn.Parameter(torch.ones(4))) for i in range(300)], 2, 1e6)
    assert len(one.slots) == looks == 300


def test_no_order_of_buckets_keeps_one_waiting() -> None:
    """Buckets are in the order in which they are ready, whether or not their tensors are whole."""
    named = [(f"p{i}", nn.Parameter(torch.zeros(4, 4))) for i in range(8)]
    found = cut(named, 2, 0.0, {p for _, p in named[2:4] + named[6:]})
    assert [{slot.name for slot in x.slots} for x in found] == [
        {"p7", "p6"}, {"p5"}, {"p4"}, {"p3", "p2"}, {"p1"}, {"p0"},
    ]  # fmt: skip
