"""A quantizer to two bits per element: the element's sign, and which of two magnitudes it gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FOUR = (0, 2, 4, 6)
"""The bit positions of the four 2-bit numbers in a byte."""


@dataclass(frozen=True)
class Levels:
    """The format with a sign per element and two sizes (magnitudes) per block of `block` elements.

    The sizes are the mean magnitudes of the block's smaller and of its larger elements, as bfloat16. An
    element counts as larger if its magnitude is above the mean magnitude of its block. Both sizes are NaN if
    the block has a NaN or an infinity. If the block has a zero, the smaller size is 0. Then zeros stay zeros,
    and small elements become zero; error feedback keeps what they lose. The format is meant for selected
    elements, few of which are nearly zero.
    """

    block: int = 64
    keeps = True

    def nbytes(self, n: int) -> int:
        return 4 * self._blocks(n) + -(-n // 16) * 4

    def encode(self, x: Tensor, code: Tensor, dice: int) -> None:
        n, blocks = x.numel(), self._blocks(x.numel())
        rows = x.new_zeros(blocks * self.block)
        rows[:n] = x
        rows = rows.view(blocks, self.block)
        there = (torch.arange(rows.numel(), device=x.device) < n).view_as(rows)
        sizes = rows.abs().double()
        large = sizes > _mean(sizes, there)[:, None]
        small = _mean(sizes, there & ~large).masked_fill_(((sizes == 0) & there).any(1), 0)
        levels = torch.stack([small, _mean(sizes, large)], 1)
        levels.masked_fill_(~levels.isfinite().all(1, keepdim=True), torch.nan)
        code[: 4 * blocks].view(torch.bfloat16).copy_(levels.view(-1))
        numbers = code.new_zeros(4 * (code.numel() - 4 * blocks))
        numbers[:n] = ((rows < 0) | large.byte() << 1).view(-1)[:n]
        places = torch.tensor(_FOUR, device=x.device)
        code[4 * blocks :] = (numbers.view(-1, 4) << places).sum(1).byte()

    def decode(self, code: Tensor, out: Tensor) -> None:
        n, blocks = out.numel(), self._blocks(out.numel())
        levels = code[: 4 * blocks].view(torch.bfloat16).float()
        places = torch.tensor(_FOUR, device=code.device, dtype=torch.uint8)
        numbers = (code[4 * blocks :, None] >> places & 3).view(-1)[:n].long()
        block = torch.arange(n, device=code.device) // self.block
        sizes = levels[2 * block + (numbers >> 1)]
        out.copy_(torch.where(numbers & 1 == 1, -sizes, sizes))

    def _blocks(self, n: int) -> int:
        return -(-n // self.block)


def _mean(x: Tensor, of: Tensor) -> Tensor:
    """Return, for each row of `x`, the mean of the elements where `of` is True; 0 if it is nowhere True."""
    return torch.where(of, x, 0).sum(1) / of.sum(1).clamp_(min=1)
