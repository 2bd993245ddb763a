"""A message in one buffer, with all that a rank sends at once: numbers and tensors of any dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 8  # bytes of the largest element

Layout = tuple[tuple[torch.dtype, int], ...]
"""The dtype and the number of elements of each tensor in a message."""


class MessageBuffer:
    """A message in one uint8 tensor, `bytes`: float64 numbers, then every tensor, each aligned to 8 bytes.

    The tensors given to its methods may have a wider dtype than the layout, and may be on another device.
    There is one number unless `numbers` says otherwise.
    """

    def __init__(self, content: Tensor, layout: Layout, numbers: int = 1) -> None:
        self.bytes = content
        self.layout = layout
        self._numbers = content[: numbers * _ALIGNED].view(torch.float64)

    @classmethod
    def like(
        cls, tensors: Sequence[Tensor], device: torch.device | None = None, numbers: int = 1
    ) -> MessageBuffer:
        """Return a buffer of zeros with room for `tensors`, on `device` or on that of the first tensor."""
        where = tensors[0].device if device is None else device
        layout = tuple((x.dtype, x.numel()) for x in tensors)
        size = numbers * _ALIGNED + sum(_room(*each) for each in layout)
        return cls(torch.zeros(size, dtype=torch.uint8, device=where), layout, numbers)

    def received(self, content: Tensor) -> MessageBuffer:
        """Return a buffer of the same layout whose bytes are `content`."""
        return MessageBuffer(content, self.layout, self._numbers.numel())

    def state_dict(self) -> dict[str, Any]:
        names = [[str(dtype).removeprefix("torch."), numel] for dtype, numel in self.layout]
        return {"bytes": self.bytes, "layout": names}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> MessageBuffer:
        """Return the buffer whose `state_dict()` is `state`; it shares the bytes in `state`."""
        layout = tuple((getattr(torch, name), numel) for name, numel in state["layout"])
        return cls(state["bytes"], layout)

    @property
    def weight(self) -> float:
        """The first number in the buffer. Reading it waits for the buffer's device."""
        return self._numbers[0].item()

    @property
    def numbers(self) -> list[float]:
        """The numbers at the beginning of the buffer. Reading them waits for the buffer's device."""
        return self._numbers.tolist()

    def pack(self, tensors: Sequence[Tensor], share: float = 1.0, *numbers: float) -> None:
        """Write `share` times every tensor, and `share` times each of `numbers`, into the buffer.

        Without `numbers` each of them is 1.
        """
        for x, mine in zip(tensors, self._contents(), strict=True):
            if x.device == mine.device:
                torch.mul(x, share, out=mine)
            else:
                mine.copy_(x.mul(share))
        for place, number in zip(self._numbers, numbers or [1.0] * self._numbers.numel(), strict=True):
            place.fill_(share * number)

    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors in the buffer into `tensors`."""
        for x, mine in zip(tensors, self._contents(), strict=True):
            x.copy_(mine)

    def add_to(self, tensors: Sequence[Tensor], factor: float = 1.0) -> None:
        """Add `factor` times each tensor in the buffer to the matching one of `tensors`."""
        for x, mine in zip(tensors, self._contents(), strict=True):
            x.add_(mine.to(x.device), alpha=factor)

    def _contents(self) -> Iterator[Tensor]:
        start = self._numbers.numel() * _ALIGNED
        for dtype, numel in self.layout:
            yield self.bytes[start : start + numel * dtype.itemsize].view(dtype)
            start += _room(dtype, numel)


def _room(dtype: torch.dtype, numel: int) -> int:
    return -(-numel * dtype.itemsize // _ALIGNED) * _ALIGNED
