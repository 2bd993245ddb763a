"""Means with quantizers alone: the same bits everywhere, and all that is lost is kept as error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor, optim

from hpcsgd.comm import Communicator
from hpcsgd.methods import Method, bsp, hierarchical
from hpcsgd.parts import quantizers
from hpcsgd.parts.grad_reduces import Quantized
from hpcsgd.parts.quantizers.base import Quantizer, noise_for
from hpcsgd.parts.quantizers.mean import mean_of_own, mean_on_all
from hpcsgd.parts.schedules import never
from references import distributed

QUANTIZERS: dict[str, Quantizer] = {
    "bf16": quantizers.bf16(),
    "fp16": quantizers.fp16(),
    "int8": quantizers.int8(block=8),
    "int4": quantizers.int4(block=8),
    "dice": quantizers.int4(block=8, rounding=quantizers.Stochastic()),
}
PIECE = 13
BY_CHANCE = quantizers.int4(block=8, rounding=quantizers.Stochastic())


def vector(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n * PIECE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(
        dtype
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_what_arrived_and_what_was_lost_is_what_was_given(run, name: str, n: int, dtype: torch.dtype) -> None:
    def one(ranks: Communicator) -> tuple[Tensor, Tensor]:
        x = vector(ranks.rank, n, dtype)
        mean = mean_on_all(x, ranks, QUANTIZERS[name], partial(noise_for, ranks.rank))
        return mean, x

    found = run(n, one)
    given = torch.stack([vector(rank, n, torch.float64) for rank in range(n)]).mean(0)
    lost = torch.stack([x.double() for _, x in found]).mean(0)
    assert all(torch.equal(mean, found[0][0]) for mean, _ in found)
    assert lost.abs().max() > 0
    rounding = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(found[0][0].double() + lost, given, rtol=0, atol=rounding)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_mean_of_the_own_piece(run, name: str, n: int) -> None:
    """The others' pieces count as they arrived, in rank order; the own one counts unchanged."""

    def one(ranks: Communicator) -> tuple[Tensor, Tensor]:
        x = vector(ranks.rank, n, torch.float32)
        return mean_of_own(x, ranks, QUANTIZERS[name], partial(noise_for, ranks.rank)), x

    found = run(n, one)
    for p, (mean, lost) in enumerate(found):
        piece = slice(p * PIECE, (p + 1) * PIECE)
        versions = [vector(i, n, torch.float32)[piece] - found[i][1][piece] for i in range(n)]
        torch.testing.assert_close(mean, torch.stack(versions).mean(0), rtol=0, atol=1e-6)
        assert lost[piece].abs().max() == 0


@dataclass
class Noting:
    """A quantizer that records the noise with which vectors were rounded."""

    keeps = False
    dice: list[int] = field(default_factory=list[int])

    def nbytes(self, n: int) -> int:
        return BY_CHANCE.nbytes(n)

    def encode(self, x: Tensor, code: Tensor, dice: int) -> None:
        self.dice.append(dice)
        BY_CHANCE.encode(x, code, dice)

    def decode(self, code: Tensor, out: Tensor) -> None:
        BY_CHANCE.decode(code, out)


@pytest.mark.parametrize(("P", "K"), [(1, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize(
    "new",
    [lambda wire: bsp(Quantized(gradients=wire)), lambda wire: hierarchical(1, quantize=wire)],
    ids=["gradients", "models"],
)
def test_no_two_vectors_are_rounded_by_the_same_dice(
    run, new: Callable[[Quantizer], Method], P: int, K: int
) -> None:
    """Pieces, ranks, buckets and steps have different noise, because equal noise would not average out."""

    def thrown(world: Communicator) -> list[int]:
        wire = Noting()
        make = lambda params: optim.SGD(params, lr=0.1)  # noqa: E731
        distributed(world, P, new(wire), make, steps=3, bucket_cap_mb=1e-4)
        return wire.dice

    found = [dice for each in run(P * K, thrown) for dice in each]
    assert len(set(found)) == len(found)
    assert found or (P == 1 and new(Noting()).schedule is not never)
