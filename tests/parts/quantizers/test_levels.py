"""Two bits per value, compared with the same in numpy."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from hpcsgd.parts.quantizers.levels import Levels
from hpcsgd.parts.quantizers.whole import Whole
from sparse_deltas import two_sizes


def there_and_back(x: Tensor, wire: Levels | Whole) -> Tensor:
    code = torch.zeros(wire.nbytes(x.numel()), dtype=torch.uint8)
    wire.encode(x, code, 0)
    out = torch.full_like(x, 7)
    wire.decode(code, out)
    return out


@hypothesis.given(n=st.integers(0, 300), seed=st.integers(0, 1000))
@hypothesis.settings(max_examples=60)
def test_values_are_those_of_numpy(n: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    assert there_and_back(torch.from_numpy(x), Levels()).tolist() == two_sizes(x).tolist()
    assert Levels().nbytes(n) == 4 * -(-n // 64) + 4 * -(-n // 16)
    whole = np.random.default_rng(seed).integers(-3, 4, n).astype(np.float32)  # with zeros and mean sizes
    assert there_and_back(torch.from_numpy(whole), Levels()).tolist() == two_sizes(whole).tolist()


def test_what_is_not_a_number_is_not_hidden() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(150)
        x[100] = bad
        arrived = there_and_back(x, Levels())
        assert arrived.isnan().tolist() == [64 <= i < 128 for i in range(150)]
        assert torch.equal(arrived[:64], x[:64])


@pytest.mark.parametrize("values", [[0.0] * 5, [3.0] * 70, [-2.0, 2.0], [1.5]])
def test_of_one_size_nothing_is_lost(values: list[float]) -> None:
    x = torch.tensor(values)
    assert torch.equal(there_and_back(x, Levels()), x)


def test_large_and_small() -> None:
    arrived = there_and_back(torch.tensor([1.0, -10.0, 3.0, 12.0, -2.0]), Levels())
    assert arrived.tolist() == [2.0, -11.0, 2.0, 11.0, -2.0]


def test_of_the_mean_size_is_small() -> None:
    assert there_and_back(torch.tensor([1.0, -2.0, 3.0]), Levels()).tolist() == [1.5, -1.5, 3.0]


def test_zeros_arrive_as_zeros() -> None:
    """A block with zeros has zeros for its small values, too; a block without zeros does not."""
    arrived = there_and_back(torch.tensor([0.0] * 20 + [8.0] * 2 + [0.25] * 42 + [1.0, 3.0]), Levels())
    assert arrived.tolist() == [0.0] * 20 + [8.0] * 2 + [0.0] * 42 + [1.0, 3.0]


def test_whole_numbers_arrive_whole() -> None:
    x = torch.randn(9)
    assert torch.equal(there_and_back(x, Whole()), x)
