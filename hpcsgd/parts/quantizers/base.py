"""The protocols of quantizers and of their rounding, and the noise for stochastic rounding."""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Quantizer(Protocol):
    """A format in which a float32 vector is sent, encoded as a uint8 vector.

    The same vector and noise give the same bytes on any device.
    """

    @property
    def keeps(self) -> bool:
        """True if rounding errors would add up, so that the sender must keep them and send them later."""
        ...

    def nbytes(self, n: int) -> int:
        """Return the number of bytes that encode n elements.

        It is a multiple of 4, so that encoded vectors can follow one another in a buffer.
        """
        ...

    def encode(self, x: Tensor, code: Tensor, dice: int) -> None:
        """Write the encoded float32 `x` into `code`; `dice` is 32 bits of noise for rounding.

        `code` is uint8 and has `nbytes` elements, all zero.
        """
        ...

    def decode(self, code: Tensor, out: Tensor) -> None:
        """Write the decoded elements of `code` into `out`."""
        ...


@runtime_checkable
class Rounding(Protocol):
    """A kind of rounding: to which of its two neighbours a number is rounded."""

    @property
    def unbiased(self) -> bool:
        """True if the rounded number has the given number as its expected value."""
        ...

    def draw(self, dice: int) -> int | None:
        """Return a number from which the kernels derive noise (from `dice`), or None to round to nearest."""
        ...


def noise_for(*numbers: int) -> int:
    """Return 32 bits of noise that `numbers` determine, such as a rank, a step and a bucket.

    Different `numbers` give different noise, except with probability 2⁻³².
    """
    return int.from_bytes(hashlib.blake2b(struct.pack(f"{len(numbers)}q", *numbers), digest_size=4).digest())
