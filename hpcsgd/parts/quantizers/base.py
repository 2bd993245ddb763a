"""What a wire format is, and where the dice of one that rounds by chance come from."""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Quantizer(Protocol):
    """How a vector of float32 travels: the same bytes for the same vector and dice, on any device."""

    @property
    def keeps(self) -> bool:
        """Whether what rounding loses is to be kept and sent later, since it would add up."""
        ...

    def nbytes(self, n: int) -> int:
        """Of n elements; a multiple of 4, so that codes can lie side by side."""
        ...

    def encode(self, x: Tensor, code: Tensor, dice: int) -> None:
        """`x`, float32, into `code`, uint8 of `nbytes`, zeros so far. `dice` is a number of 32 bits."""
        ...

    def decode(self, code: Tensor, out: Tensor) -> None:
        """The inverse, but for the rounding."""
        ...


@runtime_checkable
class Rounding(Protocol):
    """Which of its two neighbours a number becomes."""

    @property
    def unbiased(self) -> bool:
        """Whether the mean of what it makes is what it was given."""
        ...

    def draw(self, dice: int) -> int | None:
        """What the kernels round by; None: to the nearest."""
        ...


def noise_for(*numbers: int) -> int:
    """Dice that no other numbers have, but for a chance of 2⁻³²: of a rank, a step, a bucket."""
    return int.from_bytes(hashlib.blake2b(struct.pack(f"{len(numbers)}q", *numbers), digest_size=4).digest())
