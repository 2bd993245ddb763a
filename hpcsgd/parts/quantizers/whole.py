"""The format without quantization: float32, four bytes per element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Whole:
    """The format of unchanged float32 elements."""

    keeps = False

    def nbytes(self, n: int) -> int:
        return 4 * n

    def encode(self, x: Tensor, code: Tensor, dice: int) -> None:
        code.view(torch.float32).copy_(x)

    def decode(self, code: Tensor, out: Tensor) -> None:
        out.copy_(code.view(torch.float32))
