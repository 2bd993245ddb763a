"""One message for all that a position has to send: a number and tensors of any dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ALIGNED = 8  # bytes: of the largest element


class Parcel:
    """`bytes`, uint8, is what travels: a float64, then every tensor, 8-aligned."""

    def __init__(self, content: Tensor) -> None:
        self.bytes = content
        self._number = content[:_ALIGNED].view(torch.float64)

    @classmethod
    def like(cls, tensors: Sequence[Tensor]) -> Parcel:
        """Room for so much."""
        return cls(torch.zeros(_ALIGNED + sum(map(_room, tensors)), dtype=torch.uint8))

    @property
    def number(self) -> float:
        return self._number.item()

    def pack(self, tensors: Sequence[Tensor], share: float = 1.0, number: float = 1.0) -> None:
        """`share` of every tensor and of `number`."""
        for x, mine in self._contents(tensors):
            torch.mul(x, share, out=mine)
        self._number.fill_(share * number)

    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """The tensors become what is here."""
        for x, mine in self._contents(tensors):
            x.copy_(mine)

    def add_to(self, tensors: Sequence[Tensor], factor: float = 1.0) -> None:
        """x += factor · what is here."""
        for x, mine in self._contents(tensors):
            x.add_(mine, alpha=factor)

    def _contents(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        start = _ALIGNED
        for x in tensors:
            yield x, self.bytes[start : start + x.numel() * x.element_size()].view(x.dtype)
            start += _room(x)


def _room(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // _ALIGNED) * _ALIGNED
