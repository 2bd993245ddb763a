"""The error in the metrics is exactly 0 if nothing is left, and accurate if something is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hpcsgd import kernels
from hpcsgd.comm import Communicator
from hpcsgd.parts.grad_reduces import Plain, per_worker, union
from hpcsgd.parts.grad_reduces.combining import Selected
from hpcsgd.parts.grad_reduces.sparse import Combine

M = 1000
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
COMBINE = pytest.mark.parametrize("combine", [union, per_worker])


def error(
    world: Communicator, combine: Combine, acc: Tensor, mine: Tensor, leader: int | None = None
) -> float:
    squared = kernels.accumulate(acc, torch.zeros_like(acc), torch.arange(0, M + 1, 100)).sum()
    selected = Selected(acc, mine, Plain().encode(mine, len(acc)), leader, squared)
    return combine(selected, Plain(), world).errors.mean().item()


def vector(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(M, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.ranks(2)
@DTYPES
@pytest.mark.parametrize(("combine", "leader"), [(union, None), (union, 1), (per_worker, None)])
def test_where_all_is_given_nothing_is_left(
    run, combine: Combine, leader: int | None, dtype: torch.dtype
) -> None:
    def whole(world: Communicator) -> list[float]:
        accs = [vector(world.rank + 2 * i, dtype) for i in range(6)]
        return [error(world, combine, acc, torch.arange(M), leader) for acc in accs]

    def all_but_zeros(world: Communicator) -> list[float]:
        accs = [vector(world.rank + 2 * i, dtype) for i in range(6)]
        for acc in accs:
            acc[::2] = 0
        return [error(world, combine, acc, torch.arange(1, M, 2), leader) for acc in accs]

    assert run(2, whole) == run(2, all_but_zeros) == [[0] * 6] * 2


@pytest.mark.ranks(2)
@DTYPES
@COMBINE
def test_a_little_is_not_nothing(run, combine: Combine, dtype: torch.dtype) -> None:
    """One worker has some millionths of ‖acc‖ left, and the other nothing."""
    little = 3e-6 * vector(0, dtype).norm().item()

    def training(world: Communicator) -> float:
        acc = vector(world.rank, dtype)
        acc[7] = 0 if world.rank else little
        return error(world, combine, acc, torch.cat([torch.arange(7), torch.arange(8, M)]))

    assert run(2, training) == pytest.approx([little / 2] * 2, rel=0.01)


@pytest.mark.ranks(2)
@COMBINE
def test_what_is_no_number_stays(run, combine: Combine) -> None:
    def training(world: Communicator) -> float:
        acc = vector(world.rank, torch.float32)
        acc[3] = math.nan
        return error(world, combine, acc, torch.arange(10))

    assert all(map(math.isnan, run(2, training)))
