"""ExDyna's blocks: properties that hold however they move, and how even the workers' counts become."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcsgd.comm import Communicator
from hpcsgd.core.state import State
from hpcsgd.parts.sparsifiers import ExDyna
from hpcsgd.parts.sparsifiers.exdyna import (
    Uneven,
    around_mean,
    between_neighbours,
    block_size,
    even_blocks,
    moved,
)
from parts.sparsifiers.test_micro import Worker

RULES = pytest.mark.parametrize("uneven", [around_mean, between_neighbours])
SLOPE = [4 - 3.5 * i / 1023 for i in range(1024)]
"""The density of large elements in each block."""


@pytest.mark.parametrize(
    ("M", "size", "blocks"),
    [(1, 1, 1), (67, 1, 67), (1024, 1, 1024), (20_011, 19, 1024), (32 * 1024, 32, 1024),
     (33 * 1024, 32, 1024), (11_173_962, 10_912, 1024)],
)  # fmt: skip
def test_blocks_of_any_model(M: int, size: int, blocks: int) -> None:
    assert block_size(M) == size
    for n in (1, 3, 4, 16, 2000):
        parts = even_blocks(M, n)
        assert (len(parts), sum(parts)) == (n, blocks)
        assert max(parts) - min(parts) <= 1


@RULES
@given(st.data(), st.integers(1, 20), st.integers(1, 2000))
def test_no_block_is_lost_and_no_part_starved(uneven: Uneven, data: st.DataObject, n: int, M: int) -> None:
    blocks = first = even_blocks(M, n)
    for _ in range(data.draw(st.integers(1, 6))):
        k = [data.draw(st.sampled_from([0, 1, 5, 40, 10_000])) for _ in range(n)]
        before, blocks = blocks, moved(blocks, k, sum(k) * block_size(M) / M, uneven)
        assert sum(blocks) == sum(first)
        for old, new in zip(before, blocks, strict=True):
            assert new >= min(old, sum(first) / (4 * n)), "none falls below a quarter of an even part"
            assert abs(new - old) <= 2, "one from, or to, each neighbour"


def test_which_neighbours_exchange_a_block() -> None:
    even = [10, 10, 10]
    assert moved(even, [106, 94, 100], 0, around_mean) == [9, 11, 10]
    assert moved(even, [94, 106, 100], 0, around_mean) == [11, 9, 10]
    assert moved(even, [104, 92, 104], 0, around_mean) == even, "less than 1.05 times the mean"
    assert moved(even, [106, 96, 98], 0, around_mean) == even, "not below the mean by as much"
    assert moved(even, [150, 110, 40], 0, around_mean) == [10, 9, 11], "both above the mean do not exchange"
    assert moved(even, [150, 110, 40], 0, between_neighbours) == [9, 10, 11]
    assert moved(even, [104, 100, 96], 0, between_neighbours) == even
    assert moved(even, [94, 106, 106], 0, between_neighbours) == [11, 9, 10]


def test_what_a_block_takes_along_counts_at_the_next_neighbour() -> None:
    assert moved([10, 10, 10], [120, 90, 90], 0, around_mean) == [9, 11, 10]
    assert moved([10, 10, 10], [120, 90, 90], 20, around_mean) == [9, 10, 11], "110 in the middle, then"


def test_a_block_takes_along_what_a_block_has_on_average() -> None:
    """With 15 of 300 per block, the middle part rises above the mean and can give a block away."""
    exdyna = ExDyna(0.1)
    exdyna.load_state_dict(State(per_rank={"blocks": [10, 10, 10]}))
    exdyna.adapt([151, 95, 54], 0, 20)
    assert exdyna.state_dict().per_rank["blocks"] == [9, 10, 11]


def test_a_part_keeps_a_quarter_of_an_even_one() -> None:
    assert moved([3, 17, 20], [1000, 0, 500], 0, around_mean) == [3, 17, 20]
    assert moved([5, 15, 20], [1000, 0, 500], 0, around_mean) == [4, 16, 20]
    assert moved([5, 21, 22], [1000, 0, 500], 0, around_mean) == [4, 22, 22], "exactly a quarter"


@pytest.mark.parametrize(
    ("uneven", "at_least", "at_most"), [(around_mean, 1.67, 1.69), (between_neighbours, 1.15, 1.17)]
)
def test_how_even_a_slope_gets(uneven: Uneven, at_least: float, at_most: float) -> None:
    """The ratios are those in the docstring, for eight parts from dense to sparse."""
    n, M = 8, 1 << 20
    blocks = even_blocks(M, n)
    for _ in range(400):
        ends = [0, *itertools.accumulate(blocks)]
        k = [sum(SLOPE[start:stop]) for start, stop in itertools.pairwise(ends)]
        blocks = moved(blocks, k, sum(k) * block_size(M) / M, uneven)
    assert at_least <= max(k) * n / sum(k) <= at_most


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_workers_on_a_slope_select_about_as_many(run) -> None:
    """This holds with gradients, error feedback and a threshold, too: each count belongs to its part."""
    n, M, steps = 4, 1 << 16, 300

    def train(world: Communicator, compare_neighbours: bool) -> list[float]:
        worker = Worker(world, ExDyna(0.01, compare_neighbours=compare_neighbours), M)
        scale, found = torch.linspace(4, 0.5, M), []
        for _ in range(steps):
            counts = [len(each) for each in worker.step(scale * worker.gradient())]
            found.append(max(counts) * n / sum(counts))
        return found

    ours = run(n, train, True)[0]
    assert sum(ours[-50:]) / 50 <= 1.2
    assert sum(ours[:20]) / 20 > 1.5
