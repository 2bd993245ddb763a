"""The code of which k of n elements were chosen: round trips, its length, and the entropy bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from hpcsgd import UserError, kernels
from hpcsgd.kernels import chosen

Segments = tuple[Tensor, Tensor, Tensor]


def tensor(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def segments(*found: tuple[int, int, int]) -> Segments:
    """Return the segments from tuples (start, stop, k)."""
    starts, stops, k = zip(*found, strict=True) if found else ((), (), ())
    return tensor(starts), tensor(stops), tensor(k)


def written(indices: Tensor, at: Segments) -> Tensor:
    """Return the code that the reference writes."""
    code = torch.empty(kernels.chosen_bytes(*at), dtype=torch.uint8)
    chosen.encode(indices, *at, code)
    return code


def read(code: Tensor, at: Segments) -> Tensor:
    indices = torch.empty(int(at[2].sum()), dtype=torch.int64)
    chosen.decode(code, *at, indices)
    return indices


ENCODE = pytest.mark.parametrize(
    "encode", [lambda x, at: kernels.encode_chosen(x, *at), written], ids=["native", "reference"]
)
DECODE = pytest.mark.parametrize(
    "decode", [lambda x, at: kernels.decode_chosen(x, *at), read], ids=["native", "reference"]
)


@pytest.mark.usefixtures("native")
@ENCODE
@DECODE
@pytest.mark.parametrize(
    ("at", "indices", "code"),
    [
        (segments(), [], []),
        (segments((3, 3, 0), (5, 9, 0)), [], []),
        (segments((5, 8, 3)), [5, 6, 7], []),
        # l = 2: lows 1, 0, 3 = 01 00 11; then highs 0, 1, 3 as ones at 0, 2, 5 of 3 + 15 // 4 bits
        (segments((0, 16, 3)), [1, 4, 15], [0b01_110001, 0b1001]),
        (segments((2, 8, 3)), [2, 3, 7], [0b100011]),  # one bit per element is shorter
        (segments((2, 8, 3), (10, 26, 3)), [2, 3, 7, 11, 14, 25], [0b100011, 0b01_110001, 0b1001]),
        (segments((0, 1 << 40, 1)), [5 + (1 << 39)], [5, 0, 0, 0, 0x80, 0b1]),  # 40 low bits, and a one
    ],
)
def test_the_code(encode, decode, at: Segments, indices: list[int], code: list[int]) -> None:
    made = encode(tensor(indices), at)
    assert made.tolist() == code
    assert decode(made, at).tolist() == indices


@pytest.mark.slow
@pytest.mark.usefixtures("native")
@hypothesis.given(
    sizes=st.lists(st.tuples(st.integers(0, 600), st.floats(0, 1), st.integers(0, 3)), max_size=6),
    seed=st.integers(0, 2**20),
)
@hypothesis.settings(max_examples=200)
def test_there_and_back(sizes: list[tuple[int, float, int]], seed: int) -> None:
    chance, start, found, indices = np.random.default_rng(seed), 0, [], []
    for n, density, gap in sizes:
        k = round(density**3 * n)
        found.append((start + gap, start + gap + n, k))
        indices += sorted((start + gap + chance.permutation(n)[:k]).tolist())
        start += gap + n
    at = segments(*found)
    made = kernels.encode_chosen(tensor(indices), *at)
    assert torch.equal(made, written(tensor(indices), at))
    assert kernels.decode_chosen(made, *at).tolist() == indices
    assert read(made, at).tolist() == indices


@hypothesis.given(n=st.integers(1, 10_000), density=st.floats(0, 1))
def test_how_long_it_is(n: int, density: float) -> None:
    k = max(1, round(density * n))
    low = math.floor(math.log2(n / k) + 1e-12)
    expected = 0 if k == n else math.ceil(min(n, k * low + k + (n - 1) // 2**low) / 8)
    assert chosen.code_bytes(tensor([n]), tensor([k])) == expected
    assert chosen.code_bytes(tensor([n, 7, n]), tensor([k, 7, k])) == 2 * expected


@pytest.mark.parametrize("density", [1 / 8, 1 / 10, 1 / 16, 3 / 100, 1 / 32, 1 / 64, 1 / 100, 1 / 128])
def test_no_code_is_much_shorter(density: float) -> None:
    n, k = 4096, round(density * 4096)
    bound = chosen.entropy(n, k)
    ours = 8 * chosen.code_bytes(tensor([n]), tensor([k])) / bound
    print(f"density {density:.4f}: {ours:.3f} times the entropy bound, {bound / k:.2f} bits an index")
    assert 1 <= ours <= 1.2


def test_the_bound_is_that_of_the_ways_to_choose() -> None:
    for n, k in [(1, 1), (10, 3), (64, 32), (4096, 64)]:
        assert chosen.entropy(n, k) == pytest.approx(math.log2(math.comb(n, k)), rel=1e-9, abs=1e-9)


@pytest.mark.usefixtures("native")
@ENCODE
@pytest.mark.parametrize("indices", [[3, 3], [4, 2], [0, 9], [1, 20], [-1, 3]])
def test_only_what_ascends_in_its_segment_has_a_code(encode, indices: list[int]) -> None:
    for n in (9, 4):  # each of the two forms of the code
        with pytest.raises(UserError, match="ascend"):
            encode(tensor(indices), segments((0, n, 2)))


@pytest.mark.usefixtures("native")
@DECODE
@pytest.mark.parametrize(
    ("at", "code"),
    [
        (segments((0, 8, 4)), [0b111]),
        (segments((0, 8, 4)), [0b11111]),
        (segments((0, 5, 2)), [0b1000001]),  # beyond the end
        (segments((0, 16, 3)), [0b01_110001, 0]),  # two highs are missing
        (segments((0, 16, 3)), [0b01_110001, 0b11001]),  # one high too many
        (segments((0, 16, 3)), [0b11_000011, 0b10]),  # highs 0, 0: lows 3, 0
        (segments((0, 14, 3)), [0b01_110001, 0b1001]),  # position 15 of 14
    ],
)
def test_other_bytes_are_refused(decode, at: Segments, code: list[int]) -> None:
    with pytest.raises(UserError, match="not the code"):
        decode(torch.tensor(code, dtype=torch.uint8), at)


def test_a_hundredth_of_many(native: kernels.Native) -> None:
    """The native kernels and the reference agree on segments of 4096 elements and a shorter last one."""
    n, chance = 100_000, torch.Generator().manual_seed(0)
    starts = torch.arange(0, n, 4096)
    stops = (starts + 4096).clamp(max=n)
    k = ((stops - starts) / 64).round().long()
    indices = kernels.largest(torch.randn(n, generator=chance), starts, stops, k)
    at = (starts, stops, k)
    made = kernels.encode_chosen(indices, *at)
    assert torch.equal(made, written(indices, at))
    assert torch.equal(kernels.decode_chosen(made, *at), indices)
    assert 8 * made.numel() / indices.numel() == pytest.approx(8, rel=0.01)
