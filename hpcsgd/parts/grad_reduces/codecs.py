"""Formats in which the strictly ascending int64 indices of selected elements are sent as bytes."""

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
    """A format in which strictly ascending indices below M are sent."""

    def encode(self, indices: Tensor, M: int) -> Tensor:
        """Return the encoded indices, a uint8 vector, on the device of the indices."""
        ...

    def decode(self, code: Tensor, count: int) -> Tensor: ...

    def bytes_per_index(self, density: float) -> float:
        """Return the mean number of bytes per index if a random fraction `density` of indices is sent."""
        ...


@dataclass(frozen=True)
class Gaps:
    """The format of gaps: differences of consecutive indices, as integers of variable length.

    A gap below 2⁷ takes one byte, one below 2¹⁴ two. At a density of 1 % that is about 1.3 bytes per index.
    """

    def encode(self, indices: Tensor, M: int) -> Tensor:
        return kernels.encode(indices, M)

    def decode(self, code: Tensor, count: int) -> Tensor:
        return kernels.decode(code, count)

    def bytes_per_index(self, density: float) -> float:
        """Return the mean number of bytes per index.

        With density d, gaps are geometrically distributed. A gap is 2⁷ or more, and so needs a second byte,
        with probability (1 − d)^128.
        """
        return sum((1 - density) ** 2.0**bits for bits in range(7, 63, 7)) + 1


@dataclass(frozen=True)
class Plain:
    """The format with four bytes for each index."""

    def encode(self, indices: Tensor, M: int) -> Tensor:
        if M > 1 << 31:
            raise UserError(f"plain indices of 4 bytes for {M} elements: only gaps reach beyond 2³¹")
        return indices.to(torch.int32).view(torch.uint8)

    def decode(self, code: Tensor, count: int) -> Tensor:
        return code.view(torch.int32).long()

    def bytes_per_index(self, density: float) -> float:
        return 4.0


CODECS: Mapping[str, Callable[..., Codec]] = {"gaps": Gaps, "plain": Plain}
"""The formats of indices, by their names in job files."""
