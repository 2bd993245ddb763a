from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from hpcsgd import UserError, kernels
from hpcsgd.kernels import reference

ENCODE = pytest.mark.parametrize("encode", [kernels.encode, reference.encode], ids=["native", "reference"])
DECODE = pytest.mark.parametrize("decode", [kernels.decode, reference.decode], ids=["native", "reference"])
TOP = 2**63 - 1


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def code(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@ENCODE
@DECODE
@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([], []),
        ([0], [0]),
        ([0, 1, 2], [0, 0, 0]),
        ([127, 255], [127, 127]),
        ([128, 257], [128, 1, 128, 1]),
        ([300], [0xAC, 2]),
        ([5, 5 + 2**35], [5, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F]),
        ([TOP], [0xFF] * 8 + [0x7F]),
        ([0, TOP], [0, 0xFE] + [0xFF] * 7 + [0x7F]),
    ],
)
def test_the_code(encode, decode, indices, expected):
    made = encode(integers(*indices))
    assert made.dtype == torch.uint8
    assert made.tolist() == expected
    back = decode(made, len(indices))
    assert back.dtype == torch.int64
    assert back.tolist() == indices


@ENCODE
@pytest.mark.parametrize("indices", [[-1], [-1, 3], [3, 3], [4, 2], [0, -5], [TOP, -TOP], [-TOP - 1, TOP]])
def test_only_what_ascends_has_a_code(encode, indices):
    with pytest.raises(UserError, match="ascend"):
        encode(integers(*indices))


@DECODE
@pytest.mark.parametrize(
    ("bytes_", "count"),
    [
        ([], 1),
        ([1], 0),
        ([1], 2),
        ([1, 2], 1),
        ([0x80], 1),
        ([1, 0x80], 1),
        ([1, 0x80], 2),
        ([0x80] * 9 + [1], 1),
        ([0x80] * 9 + [0], 1),
        ([0xFF] * 8 + [0x7F, 0], 2),
        ([0xFF] * 8 + [0x7F] + [0xFF] * 8 + [0x7F], 2),
    ],
)
def test_other_bytes_are_refused(decode, bytes_, count):
    with pytest.raises(UserError, match="not the code"):
        decode(code(*bytes_), count)


@pytest.mark.slow
@hypothesis.given(
    gaps=st.lists(st.integers(0, 62).flatmap(lambda bits: st.integers(0, 2**bits)), max_size=60)
)
@hypothesis.settings(max_examples=150)
def test_there_and_back(gaps):
    sums = np.cumsum(np.array(gaps, object) + 1) - 1 if gaps else []
    indices = integers(*[int(index) for index in sums if index <= TOP])
    made = kernels.encode(indices)
    assert torch.equal(made, reference.encode(indices))
    assert torch.equal(kernels.decode(made, len(indices)), indices)
    assert torch.equal(reference.decode(made, len(indices)), indices)


def test_one_of_a_hundred_takes_little_more_than_a_byte():
    n = 1_000_000
    indices = torch.from_numpy(np.flatnonzero(np.random.default_rng(0).random(n) < 0.01))
    assert kernels.encode(indices).numel() / len(indices) < 1.35


def test_a_view_with_gaps_is_served():
    assert (
        kernels.encode(integers(1, 9, 3, 9, 700)[::2]).tolist()
        == reference.encode(integers(1, 3, 700)).tolist()
    )
    assert kernels.decode(code(1, 9, 2)[::2], 2).tolist() == [1, 4]
