"""One message for all that a position has to send: a number and tensors of any dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 8  # bytes: of the largest element

Layout = tuple[tuple[torch.dtype, int], ...]
"""The dtype and the number of elements of each tensor."""


class MessageBuffer:
    """`bytes`, uint8, is what travels: a float64, then every tensor, 8-aligned.

    Tensors that are packed or that it is added to may be of a wider dtype than what travels, and elsewhere.
    """

    def __init__(self, content: Tensor, layout: Layout) -> None:
        self.bytes = content
        self.layout = layout
        self._number = content[:_ALIGNED].view(torch.float64)

    @classmethod
    def like(cls, tensors: Sequence[Tensor], device: torch.device | None = None) -> MessageBuffer:
        """Room for so much, where the first tensor is, or on `device`."""
        where = tensors[0].device if device is None else device
        layout = tuple((x.dtype, x.numel()) for x in tensors)
        size = _ALIGNED + sum(_room(*each) for each in layout)
        return cls(torch.zeros(size, dtype=torch.uint8, device=where), layout)

    def state_dict(self) -> dict[str, Any]:
        names = [[str(dtype).removeprefix("torch."), numel] for dtype, numel in self.layout]
        return {"bytes": self.bytes, "layout": names}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> MessageBuffer:
        """Of what `state_dict` returned, with the very bytes of it."""
        layout = tuple((getattr(torch, name), numel) for name, numel in state["layout"])
        return cls(state["bytes"], layout)

    @property
    def weight(self) -> float:
        """Waits for the device that it is on."""
        return self._number.item()

    def pack(self, tensors: Sequence[Tensor], share: float = 1.0, number: float = 1.0) -> None:
        """`share` of every tensor and of `number`."""
        for x, mine in zip(tensors, self._contents(), strict=True):
            if x.device == mine.device:
                torch.mul(x, share, out=mine)
            else:
                mine.copy_(x.mul(share))
        self._number.fill_(share * number)

    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """The tensors become what is here."""
        for x, mine in zip(tensors, self._contents(), strict=True):
            x.copy_(mine)

    def add_to(self, tensors: Sequence[Tensor], factor: float = 1.0) -> None:
        """x += factor · what is here."""
        for x, mine in zip(tensors, self._contents(), strict=True):
            x.add_(mine.to(x.device), alpha=factor)

    def _contents(self) -> Iterator[Tensor]:
        start = _ALIGNED
        for dtype, numel in self.layout:
            yield self.bytes[start : start + numel * dtype.itemsize].view(dtype)
            start += _room(dtype, numel)


def _room(dtype: torch.dtype, numel: int) -> int:
    return -(-numel * dtype.itemsize // _ALIGNED) * _ALIGNED
