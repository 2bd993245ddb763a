"""The values of a vector after quantization, and how many bytes it takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcsgd import UserError, quantizers
from hpcsgd.parts.quantizers.base import Quantizer, noise_for
from hpcsgd.parts.quantizers.mean import decoded
from packing import by_blocks, half

ALL: dict[str, Quantizer] = {
    "bf16": quantizers.bf16(),
    "fp16": quantizers.fp16(),
    "int8": quantizers.int8(block=16),
    "int4": quantizers.int4(block=16),
    "int2": quantizers.int2(block=16),
    "dice": quantizers.int8(block=16, rounding=quantizers.Stochastic()),
}


def there_and_back(wire: Quantizer, x: Tensor, dice: int = 1) -> Tensor:
    code = torch.zeros(wire.nbytes(x.numel()), dtype=torch.uint8)
    wire.encode(x, code, dice)
    return decoded(code, x.numel(), wire)


def some(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 15, 16, 17, 101])
def test_as_in_numpy(n: int) -> None:
    x = some(n)
    assert np.array_equal(there_and_back(ALL["fp16"], x).numpy(), half(x.numpy()))
    assert np.array_equal(there_and_back(ALL["int8"], x).numpy(), by_blocks(8, 16)(x.numpy()))
    assert np.array_equal(there_and_back(ALL["int4"], x).numpy(), by_blocks(4, 16)(x.numpy()))
    assert np.array_equal(there_and_back(ALL["int2"], x).numpy(), by_blocks(2, 16)(x.numpy()))


def test_bf16_is_the_upper_half_to_the_nearest_even() -> None:
    bits = np.array([0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0xFF7FFFFF, 1], np.uint32)
    found = there_and_back(ALL["bf16"], torch.from_numpy(bits.view(np.float32)))
    expected = np.array(
        [0x3F800000, 0x3F800000, 0x3F800000, 0x3F810000, 0x3F820000, 0xFF800000, 0], np.uint32
    )
    assert found.numpy().view(np.uint32).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("wire", "n", "nbytes"),
    [
        ("bf16", 0, 0), ("bf16", 1, 4), ("bf16", 6, 12), ("fp16", 7, 16),
        ("int8", 0, 0), ("int8", 1, 8), ("int8", 16, 20), ("int8", 17, 28),
        ("int4", 1, 8), ("int4", 8, 8), ("int4", 16, 12), ("int4", 17, 20),
        ("int2", 1, 8), ("int2", 8, 8), ("int2", 16, 8), ("int2", 17, 16),
    ],
)  # fmt: skip
def test_bytes(wire: str, n: int, nbytes: int) -> None:
    assert ALL[wire].nbytes(n) == nbytes


@pytest.mark.parametrize("name", ALL)
def test_what_is_no_number_arrives_as_none(name: str) -> None:
    x = torch.ones(40)
    x[3], x[20] = torch.nan, torch.inf
    found = there_and_back(ALL[name], x)
    assert found[3].isnan()
    assert not found[20].isfinite()
    assert found[39] == (1 if name != "int2" else pytest.approx(1.4))  # a block of ones has the scale 1.4
    if name in ("bf16", "fp16"):
        assert found[20] == torch.inf
        assert found[2] == 1


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_nothing(name: str) -> None:
    assert there_and_back(ALL[name], torch.zeros(33)).abs().max() == 0


def test_the_dice_are_the_same_from_run_to_run_and_others_elsewhere() -> None:
    x, wire = some(64), ALL["dice"]
    assert torch.equal(there_and_back(wire, x, noise_for(1, 2)), there_and_back(wire, x, noise_for(1, 2)))
    assert not torch.equal(there_and_back(wire, x, noise_for(1, 2)), there_and_back(wire, x, noise_for(2, 1)))
    other = quantizers.int8(block=16, rounding=quantizers.Stochastic(seed=1))
    assert not torch.equal(there_and_back(wire, x, 5), there_and_back(other, x, 5))


def test_what_two_bits_lose() -> None:
    """The lost share of the energy is that in docs/wires.md."""
    chance, n = torch.Generator().manual_seed(0), 1 << 18
    signs = torch.randint(2, (n,), generator=chance) * 2 - 1
    laplaces = signs * torch.empty(n).exponential_(generator=chance)
    for x, lost in ((torch.randn(n, generator=chance), 0.14), (laplaces, 0.20)):
        apart = there_and_back(quantizers.int2(), x) - x
        assert (apart.square().sum() / x.square().sum()).item() == pytest.approx(lost, abs=0.005)


def test_what_rounds_to_the_nearest_keeps_what_it_loses() -> None:
    assert {name for name, wire in ALL.items() if wire.keeps} == {"int8", "int4", "int2"}


@pytest.mark.parametrize("block", [0, -8, 4, 100])
def test_blocks_of_other_sizes_are_refused(block: int) -> None:
    for make in (quantizers.int8, quantizers.int4, quantizers.int2):
        with pytest.raises(UserError, match="multiple of 8"):
            make(block=block)


def test_a_seed_is_a_number() -> None:
    with pytest.raises(UserError, match="seed = -1"):
        quantizers.Stochastic(seed=-1)
