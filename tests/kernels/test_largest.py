"""The k elements of largest magnitude: native and reference agree on arrays that are made to mislead it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from arrays import MAKERS, ascending, at_the_end, constant, cuts, descending, few_values, lists, made, normal
from hpcsgd import UserError, kernels
from hpcsgd.kernels import reference


def check(everywhere: Callable[..., list], x: torch.Tensor, *segments: torch.Tensor) -> None:
    expected = reference.largest(x, *segments)
    for found in everywhere(lambda library: library.largest(x, *segments)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


BOTH = pytest.mark.parametrize("largest", [kernels.largest, reference.largest], ids=["native", "reference"])


@BOTH
@pytest.mark.parametrize(
    ("x", "k", "expected"),
    [
        ([1, -3, 2, 0.5], 2, [1, 2]),
        ([2, -2, 2, -2], 3, [0, 1, 2]),
        ([0.0, -0.0, 0.0], 2, [0, 1]),
        ([1e-45, 0, -1e-45], 2, [0, 2]),
        ([3e38, math.inf, math.nan, -math.inf, 5], 1, [2]),
        ([3e38, -math.inf, math.nan, math.inf, 5], 2, [1, 2]),
        ([math.nan, -math.nan, math.inf, math.nan], 2, [0, 1]),
        ([1, 2], 0, []),
        ([1, 2], 2, [0, 1]),
        ([], 0, []),
    ],
)
def test_what_is_largest(largest, x, k, expected):
    found = largest(torch.tensor(x, dtype=torch.float32), *lists([0], [len(x)], [k]))
    assert found.dtype == torch.int64
    assert found.tolist() == expected


@BOTH
def test_every_segment_has_its_own_k(largest):
    x = torch.tensor([9.0, 1, 2, 3, 9, 9, 5, 4])
    assert largest(x, *lists([1, 4, 4, 6], [4, 4, 5, 8], [2, 0, 1, 1])).tolist() == [2, 3, 4, 6]


def test_float64_is_compared_as_such():
    x = torch.tensor([1.0, 1 + 1e-12, 1.0], dtype=torch.float64)
    assert kernels.largest(x, *lists([0], [3], [1])).tolist() == [1]


def test_a_view_with_gaps_is_served():
    x = torch.tensor([1.0, 100, 3, 100, 2, 100])[::2]
    assert kernels.largest(x, *lists([0], [3], [1])).tolist() == [1]


def test_integers_have_no_nan():
    with pytest.raises(UserError, match="floating"):
        kernels.largest(torch.arange(3), *lists([0], [3], [1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["native", "reference"])
@pytest.mark.parametrize(
    "segments",
    [
        ([0], [5], [1]),
        ([-1], [2], [1]),
        ([0], [4], [5]),
        ([0], [4], [-1]),
        ([0, 1], [2, 4], [1, 1]),
        ([2, 0], [4, 2], [1, 1]),
        ([3], [2], [0]),
        ([0, 2], [2, 4], [1]),
    ],
)
def test_segments_outside_or_overlapping_are_our_mistake(segments, dtype):
    with pytest.raises(AssertionError):
        kernels.largest(torch.ones(4, dtype=dtype), *lists(*segments))


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_small_arrays(everywhere, maker):
    """Sizes are near those of a vector, of a word of 32 elements and of a block of 512."""
    rng = np.random.default_rng(1)
    for n in [*range(1, 70), 255, 256, 257, 511, 512, 513, 1025, 4097]:
        x = made(maker, rng, n, shift=n % 5)
        k = int(rng.integers(0, n + 1))
        check(lambda call: everywhere(call, threads=(1,)), x, *lists([0], [n], [k]))


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_arrays_that_overflow_their_candidates(everywhere, maker):
    """There are more elements than room for candidates, with and without a sample."""
    rng = np.random.default_rng(2)
    for n, k in [(6000, 1), (8191, 20), (8192, 20), (30011, 1), (30011, 30), (70001, 700), (70001, 69000)]:
        check(
            lambda call: everywhere(call, threads=(1,)), made(maker, rng, n, shift=1), *lists([0], [n], [k])
        )


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_several_segments(everywhere, maker):
    rng = np.random.default_rng(3)
    for segments in (2, 7, 300):
        n = int(rng.integers(1, 60_000))
        check(lambda call: everywhere(call, threads=(1,)), made(maker, rng, n), *cuts(rng, n, segments))


@pytest.mark.slow
@pytest.mark.parametrize(
    "maker",
    [normal, few_values, constant, ascending, descending, at_the_end],
    ids=lambda maker: maker.__name__,
)
def test_parts_of_a_segment_share_its_k(everywhere, maker):
    """Segments are cut into parts for several threads; ties and the largest elements lie in several parts."""
    rng = np.random.default_rng(4)
    n = 3 * 2**19 + 77
    x = made(maker, rng, n, shift=3)
    check(everywhere, x, *lists([5], [n - 3], [40_000]))
    check(everywhere, x, *lists([0, 900, 2**19 + 1], [700, 2**19, n], [700, 0, 3]))


def test_a_sample_that_deceives(everywhere, native):
    """The sampled elements are the largest, so that fewer than k elements exceed the estimated threshold."""
    n, k = 50_000, 100
    positions = np.zeros(n, np.int64)
    pointer = positions.ctypes.data_as(ctypes.c_void_p)
    m = native.functions.hpcsgd_sample(ctypes.c_int64(n), ctypes.c_int64(k), pointer)
    assert 50 < m <= n / 4
    x = made(normal, np.random.default_rng(5), n)
    x[positions[:50]] += 100
    check(everywhere, x, *lists([0], [n], [k]))


def test_the_sample_covers_the_segment(native):
    positions = np.zeros(50_000, np.int64)
    pointer = positions.ctypes.data_as(ctypes.c_void_p)
    m = native.functions.hpcsgd_sample(ctypes.c_int64(200_000), ctypes.c_int64(500), pointer)
    chosen = positions[:m]
    assert (np.diff(chosen) > 0).all()
    assert chosen[0] >= 0
    assert chosen[-1] < 200_000
    assert np.diff(chosen, prepend=0, append=200_000).max() <= 2 * 200_000 / m
    assert len(np.unique(chosen % 64)) == 64


@pytest.mark.slow
@hypothesis.given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=300, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_any_mixture(everywhere, data, seed):
    """Arrays are made of pieces of different kinds, and segments do not match the pieces."""
    rng = np.random.default_rng(seed)
    stretches = data.draw(st.lists(st.tuples(st.sampled_from(MAKERS), st.integers(0, 12_000)), max_size=4))
    pieces = [maker(rng, n).astype(np.float32) for maker, n in stretches]
    x = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *pieces]))
    segments = data.draw(st.integers(0, 6))
    check(lambda call: everywhere(call, threads=(2,)), x, *cuts(rng, len(x), segments))
