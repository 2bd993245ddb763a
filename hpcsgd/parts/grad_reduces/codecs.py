"""How indices travel: strictly ascending int64 as bytes, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hpcsgd import kernels
from hpcsgd.errors import UserError


@runtime_checkable
class Codec(Protocol):
    """Of indices below M."""

    def encode(self, indices: Tensor, M: int) -> Tensor:
        """uint8, on the same device."""
        ...

    def decode(self, code: Tensor, count: int) -> Tensor: ...

    def bytes_per_index(self, density: float) -> float:
        """On the mean, of indices that are spread evenly."""
        ...


@dataclass(frozen=True)
class Gaps:
    """Differences as integers of variable length: a byte for gaps below 2⁷, two below 2¹⁴. At a density of
    1 % that is about 1.3 bytes an index."""

    def encode(self, indices: Tensor, M: int) -> Tensor:
        return kernels.encode(indices, M)

    def decode(self, code: Tensor, count: int) -> Tensor:
        return kernels.decode(code, count)

    def bytes_per_index(self, density: float) -> float:
        """A gap is geometric: it is 2⁷ or more, and so needs a second byte, with a chance of (1 − d)^128."""
        return sum((1 - density) ** 2.0**bits for bits in range(7, 63, 7)) + 1


@dataclass(frozen=True)
class Plain:
    """Four bytes an index."""

    def encode(self, indices: Tensor, M: int) -> Tensor:
        if M > 1 << 31:
            raise UserError(f"plain indices of 4 bytes for {M} elements: only gaps reach beyond 2³¹")
        return indices.to(torch.int32).view(torch.uint8)

    def decode(self, code: Tensor, count: int) -> Tensor:
        return code.view(torch.int32).long()

    def bytes_per_index(self, density: float) -> float:
        return 4.0


CODECS: Mapping[str, Callable[..., Codec]] = {"gaps": Gaps, "plain": Plain}
"""As job files call them."""
