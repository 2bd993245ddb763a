"""Checks and properties of tensors given to communicators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def require(condition: bool, message: str) -> None:
    """Raise `ValueError` with this `message` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def device_of(tensors: Sequence[Tensor]) -> torch.device | None:
    """Return the device that some of the tensors are on; `None` if all are on the host."""
    return next((x.device for x in tensors if not x.is_cpu), None)


def nbytes(x: Tensor) -> int:
    """Return the number of bytes of the elements of `x`."""
    return x.numel() * x.element_size()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    a0, b0 = a.data_ptr(), b.data_ptr()
    return a.numel() > 0 and b.numel() > 0 and a0 < b0 + nbytes(b) and b0 < a0 + nbytes(a)
