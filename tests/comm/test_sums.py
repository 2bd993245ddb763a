"""Tests of reductions that torch computes where a library only moves the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpcsgd.comm import sums
from hpcsgd.comm.backend import Reduction

LARGE = 40000.0
"""A value of which the double exceeds the range of float16."""


class Alone:
    """A communicator of `size` ranks, all of which contribute the same as this one."""

    def __init__(self, size: int) -> None:
        self.size = size

    def alltoall(self, out: Tensor, x: Tensor) -> None:
        out.copy_(x.view(self.size, -1)[0].repeat(self.size).view_as(out))

    def allgather(self, out: Tensor, x: Tensor) -> None:
        out.copy_(x.repeat(self.size))


def ranks(size: int) -> Any:
    return Alone(size)


@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_of_16_bits_is_rounded_after_the_division(size: int) -> None:
    """The sum before the division exceeds the range of float16."""
    x = torch.full((2 * size,), LARGE, dtype=torch.float16)
    out = torch.empty(2, dtype=torch.float16)
    sums.reduce_scatter(ranks(size), out, x, "mean")
    assert out.tolist() == [LARGE] * 2
    sums.allreduce(ranks(size), x, "mean")
    assert x.tolist() == [LARGE] * 2 * size
    sums.reduce_scatter(ranks(size), out, torch.full((2 * size,), LARGE, dtype=torch.float16), "sum")
    assert out.isinf().all()


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 6.0), ("mean", 2.0), ("max", 2.0)])
def test_all_reductions(reduction: Reduction, expected: float) -> None:
    x = torch.full((5,), 2.0)
    sums.allreduce(ranks(3), x, reduction)
    assert x.tolist() == [expected] * 5
