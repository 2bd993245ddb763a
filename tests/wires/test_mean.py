"""Means by wires alone: the same bits everywhere, and nothing lost that is not kept."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from hpcsgd import wires
from hpcsgd.transport import Transport
from hpcsgd.wires.base import Wire, throw
from hpcsgd.wires.mean import mean_of_own, mean_on_all

WIRES: dict[str, Wire] = {
    "bf16": wires.bf16(),
    "fp16": wires.fp16(),
    "int8": wires.int8(block=8),
    "int4": wires.int4(block=8),
    "dice": wires.int4(block=8, rounding=wires.Stochastic()),
}
PIECE = 13


def vector(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n * PIECE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(
        dtype
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("name", WIRES)
def test_what_arrived_and_what_was_lost_is_what_was_given(run, name: str, n: int, dtype: torch.dtype) -> None:
    def one(ranks: Transport) -> tuple[Tensor, Tensor]:
        x = vector(ranks.rank, n, dtype)
        mean = mean_on_all(x, ranks, WIRES[name], partial(throw, ranks.rank))
        return mean, x

    found = run(n, one)
    given = torch.stack([vector(rank, n, torch.float64) for rank in range(n)]).mean(0)
    lost = torch.stack([x.double() for _, x in found]).mean(0)
    assert all(torch.equal(mean, found[0][0]) for mean, _ in found)
    assert lost.abs().max() > 0
    rounding = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(found[0][0].double() + lost, given, rtol=0, atol=rounding)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("name", WIRES)
def test_the_mean_of_the_own_piece(run, name: str, n: int) -> None:
    """Of the others' versions as they arrived, in rank order; the own one as it is."""

    def one(ranks: Transport) -> tuple[Tensor, Tensor]:
        x = vector(ranks.rank, n, torch.float32)
        return mean_of_own(x, ranks, WIRES[name], partial(throw, ranks.rank)), x

    found = run(n, one)
    for p, (mean, lost) in enumerate(found):
        piece = slice(p * PIECE, (p + 1) * PIECE)
        versions = [vector(i, n, torch.float32)[piece] - found[i][1][piece] for i in range(n)]
        torch.testing.assert_close(mean, torch.stack(versions).mean(0), rtol=0, atol=1e-6)
        assert lost[piece].abs().max() == 0
