"""What a group sends to another when they gossip: its chunk and its push-sum weight, in one message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpcsgd.flat import Bucket

_ALIGNED = 8  # bytes: of the largest element


class Parcel:
    """`bytes`, uint8, is what travels: a float64, then the chunk `own` of every bucket, 8-aligned."""

    def __init__(self, content: Tensor) -> None:
        self.bytes = content
        self._weight = content[:_ALIGNED].view(torch.float64)

    @classmethod
    def for_chunks(cls, buckets: Sequence[Bucket]) -> Parcel:
        """Room for as much as these buckets own."""
        return cls(torch.zeros(_ALIGNED + sum(map(_room, buckets)), dtype=torch.uint8))

    @property
    def weight(self) -> float:
        return self._weight.item()

    def pack(self, buckets: Sequence[Bucket], share: float = 1.0, weight: float = 1.0) -> None:
        """`share` of every own chunk and of `weight`."""
        for b, chunk in self._chunks(buckets):
            torch.mul(b.own, share, out=chunk)
        self._weight.fill_(share * weight)

    def add_to(self, buckets: Sequence[Bucket], factor: float = 1.0) -> None:
        """own += factor · chunk."""
        for b, chunk in self._chunks(buckets):
            b.own.add_(chunk, alpha=factor)

    def _chunks(self, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, Tensor]]:
        start = _ALIGNED
        for b in buckets:
            size = b.own.numel() * b.own.element_size()
            yield b, self.bytes[start : start + size].view(b.own.dtype)
            start += _room(b)


def _room(b: Bucket) -> int:
    return -(-b.own.numel() * b.own.element_size() // _ALIGNED) * _ALIGNED
