"""What a group sends to another when they gossip: its chunk and its push-sum weight, in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcsgd.flat import Bucket

_ALIGNED = 8  # bytes: of the largest element


class Parcel:
    """Room for the chunk `own` of every bucket, and a weight. `bytes`, uint8, is what travels."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        sizes = [b.own.numel() * b.own.element_size() for b in buckets]
        starts = [_ALIGNED]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
        self.bytes = torch.zeros(starts[-1], dtype=torch.uint8)
        self.chunks: list[Tensor] = [
            self.bytes[start : start + size].view(b.own.dtype)
            for b, start, size in zip(buckets, starts, sizes, strict=False)
        ]
        self._weight = self.bytes[:_ALIGNED].view(torch.float64)

    @property
    def weight(self) -> float:
        return self._weight.item()

    def pack(self, buckets: Sequence[Bucket], share: float, weight: float = 1.0) -> None:
        """`share` of every own chunk and of `weight`."""
        for chunk, b in zip(self.chunks, buckets, strict=True):
            torch.mul(b.own, share, out=chunk)
        self._weight.fill_(share * weight)

    def add_to(self, buckets: Sequence[Bucket], factor: float = 1.0) -> None:
        """own += factor · chunk."""
        for chunk, b in zip(self.chunks, buckets, strict=True):
            b.own.add_(chunk, alpha=factor)
