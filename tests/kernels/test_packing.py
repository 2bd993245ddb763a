"""Vectors packed into few bits, compared with plain numpy, by native kernels and by the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcsgd import kernels
from hpcsgd.kernels import reference
from packing import by_blocks

LAYOUTS = pytest.mark.parametrize(
    ("bits", "block"), [(8, 8), (8, 256), (8, 1000), (4, 8), (4, 64), (4, 1032), (2, 8), (2, 128), (2, 1032)]
)
SIZES = [0, 1, 2, 7, 8, 9, 63, 257, 1031, 4099]


def packed(by, x: Tensor, bits: int, block: int, draw: int | None = None) -> Tensor:
    code = torch.zeros(kernels.packed_bytes(x.numel(), block, bits), dtype=torch.uint8)
    by.pack(x, code, block, bits, draw)
    return code


def unpacked(by, code: Tensor, n: int, bits: int, block: int) -> Tensor:
    out = torch.full((n,), 7.5)
    by.unpack(code, out, block, bits)
    return out


def elements(n: int) -> Tensor:
    """Return elements of all sizes, with blocks of zeros, of subnormal numbers and of large numbers."""
    rng = np.random.default_rng(n)
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 3, n)).astype(np.float32)
    x[n // 8 : n // 4] = 0
    x[n // 4 : n // 3] *= np.float32(1e-42)
    x[n // 2 : n // 2 + 3] = 3e38
    x[n // 2 + 1 : n // 2 + 2] *= -1
    return torch.from_numpy(x)


def halves(n: int) -> Tensor:
    """Return values half-way between two integers, in blocks whose scale is 1."""
    x = torch.arange(n) % 13 - 6 + 0.5
    x[::8] = 127
    return x


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@LAYOUTS
@pytest.mark.parametrize("n", SIZES)
def test_as_in_numpy(bits: int, block: int, n: int) -> None:
    for x in (elements(n), halves(n)):
        expected = by_blocks(bits, block)(x.numpy())
        for by in (kernels, reference):
            found = unpacked(by, packed(by, x, bits, block), n, bits, block)
            assert np.array_equal(found.numpy(), expected)


@LAYOUTS
@pytest.mark.parametrize("draw", [None, 0, 1, 2**32 - 1])
@pytest.mark.parametrize("n", SIZES)
def test_as_the_reference(everywhere, bits: int, block: int, draw: int | None, n: int) -> None:
    if bits == 2 and draw is not None:
        return  # 2 bits are always rounded to the nearest
    x = elements(n)
    if n > 100:
        x[5], x[70], x[90] = torch.nan, torch.inf, -torch.inf
    code = packed(reference, x, bits, block, draw)
    out = unpacked(reference, code, n, bits, block)
    for theirs in everywhere(lambda library: packed(library, x, bits, block, draw)):
        assert torch.equal(theirs, code)
    for theirs in everywhere(lambda library: unpacked(library, code, n, bits, block)):
        assert same_bits(theirs, out)


@pytest.mark.parametrize(("bits", "draw"), [(4, 9), (2, None)])
def test_many_threads_have_the_same_bits(everywhere, bits: int, draw: int | None) -> None:
    x = elements((1 << 20) + 13)
    code = packed(reference, x, bits, 64, draw)
    out = unpacked(reference, code, x.numel(), bits, 64)
    assert all(torch.equal(code, theirs) for theirs in everywhere(lambda by: packed(by, x, bits, 64, draw)))
    outs = everywhere(lambda by: unpacked(by, code, x.numel(), bits, 64))
    assert all(same_bits(out, theirs) for theirs in outs)


@LAYOUTS
def test_no_number_is_found_by_its_block_and_no_other(bits: int, block: int) -> None:
    for odd in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(3 * block)
        x[block + 1] = odd
        found = unpacked(kernels, packed(kernels, x, bits, block), 3 * block, bits, block)
        assert found.isnan().tolist() == [False] * block + [True] * block + [False] * block
        assert found[0] == found[-1] == (1 if bits > 2 else pytest.approx(1.4))  # the scale of ones


def test_of_two_bits_the_side_of_the_largest_has_two_levels() -> None:
    """The mean magnitude of x is 5/7, and so the scale is 1."""
    x = torch.tensor([2.6, -1.1, 0.4, 0.0, -0.3, 0.6, 0.0, 0.714285])
    x = x * (5 / 7 / x.abs().mean())
    for sign in (1, -1):
        found = unpacked(kernels, packed(kernels, sign * x, 2, 8), 8, 2, 8)
        torch.testing.assert_close(found, sign * torch.tensor([2.0, -1, 0, 0, 0, 1, 0, 1]))


@pytest.mark.parametrize(("draw", "most"), [("normal", 0.142), ("laplace", 0.203)])
def test_of_two_bits_so_much_is_lost(draw: str, most: float) -> None:
    """The lost fraction of the energy is bounded.

    For normal elements, four levels without a zero lose 0.118 at least.
    """
    x = torch.from_numpy(getattr(np.random.default_rng(0), draw)(size=1 << 16).astype(np.float32))
    found = unpacked(kernels, packed(kernels, x, 2, 128), x.numel(), 2, 128)
    assert 0.75 * most < ((x - found).square().sum() / x.square().sum()).item() < most


@pytest.mark.parametrize("bits", [4, 8])
def test_by_chance_the_mean_is_right(bits: int) -> None:
    """The mean of many draws is within five standard deviations; the scale is 1, as is the step of levels."""
    most, draws = 2 ** (bits - 1) - 1, 4000
    x = torch.linspace(-most, most, 64)
    found = torch.stack(
        [unpacked(kernels, packed(kernels, x, bits, 64, d * 7919), 64, bits, 64) for d in range(draws)]
    )
    assert (found - x).abs().max() < 1
    fraction = x - x.floor()
    deviation = (fraction * (1 - fraction) / draws).sqrt()
    assert ((found.double().mean(0) - x).abs() <= 5 * deviation + 1e-5).all()
    assert torch.equal(found[:, 0], torch.full((draws,), -float(most)))  # integers are exact


def test_the_dice_of_neighbours_and_of_draws_have_nothing_in_common() -> None:
    rolls = torch.stack([reference.chances(4096, draw, torch.empty(0)) for draw in (0, 1, 2, 3, 1 << 31)])
    assert ((rolls >= 0) & (rolls < 1)).all()
    shifted = torch.cat([rolls, rolls[:, 1:].new_zeros(5, 4096).copy_(rolls.roll(1, 1))])
    off_diagonal = torch.corrcoef(shifted) - torch.eye(10)
    assert off_diagonal.abs().max() < 5 / 64
    counts = torch.histc(rolls, 16, 0, 1)
    assert ((counts - 1280).abs() < 5 * 1280**0.5).all()


def test_without_a_library_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    x = elements(300)
    code = packed(kernels, x, 4, 64, 5)
    monkeypatch.setattr(kernels, "native", lambda: None)
    assert torch.equal(packed(kernels, x, 4, 64, 5), code)
    assert torch.equal(unpacked(kernels, code, 300, 4, 64), unpacked(reference, code, 300, 4, 64))


@pytest.mark.parametrize(
    ("bits", "block", "room"), [(8, 8, 15), (8, 12, 16), (5, 8, 16), (8, 0, 16), (2, 8, 5)]
)
def test_what_does_not_fit_is_our_mistake(bits: int, block: int, room: int) -> None:
    with pytest.raises(AssertionError):
        kernels.pack(torch.ones(8), torch.zeros(room, dtype=torch.uint8), block, bits)
