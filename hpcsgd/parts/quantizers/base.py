"""The protocol of quantizers, and the noise for those that round stochastically."""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Quantizer(Protocol):
    """The format in which a float32 vector is sent: its code is a uint8 vector.

    The same vector and noise give the same bytes on any device.
    """

    @property
    def keeps(self) -> bool:
        """True if rounding errors would add up, so that the sender must keep them and send them later."""
        ...

    def nbytes(self, n: int) -> int:
        """Return the bytes that encode n elements; a multiple of 4, so that codes can follow one another."""
        ...

    def encode(self, x: Tensor, code: Tensor, dice: int) -> None:
        """Write float32 `x` into `code`, `nbytes` zeros (uint8). `dice` is 32 bits of noise for rounding."""
        ...

    def decode(self, code: Tensor, out: Tensor) -> None:
        """Write the decoded elements of `code` into `out`."""
        ...


@runtime_checkable
class Rounding(Protocol):
    """How a number is rounded to one of its two neighbours."""

    @property
    def unbiased(self) -> bool:
        """True if the mean of the rounded numbers is the given number."""
        ...

    def draw(self, dice: int) -> int | None:
        """Return the number from which the kernels derive the noise, or None to round to the nearest."""
        ...


def noise_for(*numbers: int) -> int:
    """Return 32 bits of noise that these numbers determine, such as a rank, a step and a bucket.

    Different numbers give different noise, except with probability 2⁻³².
    """
    return int.from_bytes(hashlib.blake2b(struct.pack(f"{len(numbers)}q", *numbers), digest_size=4).digest())
