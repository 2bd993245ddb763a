"""AR-SGD by recursive doubling, with which gossip is compared."""

from __future__ import annotations

import pytest
import torch

from gossip.doubling import average
from hpcsgd.comm import Communicator


@pytest.mark.parametrize("n", [2, 4, 8])
def test_doubling_is_the_mean(run, n: int) -> None:
    def averaged(world: Communicator) -> list[torch.Tensor]:
        mine = [torch.arange(3.0) * 10**world.rank, torch.full((2, 1), float(world.rank))]
        average(mine, world)
        return mine

    for vector, matrix in run(n, averaged):
        torch.testing.assert_close(vector, torch.arange(3.0) * sum(10**r for r in range(n)) / n)
        torch.testing.assert_close(matrix, torch.full((2, 1), (n - 1) / 2))
