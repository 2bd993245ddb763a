"""Norms of long vectors, at memory speed and right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hpcsgd.comm import Communicator, accumulation_dtype

BLOCK = 1 << 16
"""Elements: one float32 sum over tens of millions of squares is off in the third digit, float64 throughout
takes many times as long."""


def squared_norm(x: Tensor) -> Tensor:
    """‖x‖², float64, of a tensor of floats: float32 within blocks (float64 of float64), float64 over them."""
    norms = _norms_of_blocks(x.reshape(-1), accumulation_dtype(x.dtype))
    return norms.double().square().sum()


def norm(x: Tensor, order: float = 2.0) -> Tensor:
    """‖x‖ of any order, float64; of a complex number the absolute value counts."""
    if not x.numel():
        return torch.zeros((), dtype=torch.float64, device=x.device)
    if order == 2:
        return squared_norm(x).sqrt()
    return _vector_norm(x, order, torch.complex128 if x.is_complex() else torch.float64)


def sum_on_host(numbers: Iterable[Tensor]) -> Tensor:
    """Of float64 numbers, in their order; a device is waited for once."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for number in as_vector(list(numbers)).cpu():
        total += number
    return total


def total_norm(parts: Sequence[Tensor], order: float, ranks: Communicator | None) -> Tensor:
    """Of all parts together, and of those that other `ranks` hold; then collective, 8 bytes."""
    norms = [norm(part, order) for part in parts] or [torch.zeros((), dtype=torch.float64, device="cpu")]
    total = _vector_norm(as_vector(norms), order, torch.float64)
    if ranks is None:
        return total
    if math.isinf(order):
        ranks.allreduce(total, "max").wait()
        return total
    powered = total.pow(order)
    ranks.allreduce(powered).wait()
    return powered.pow(1 / order)


def clip(parts: Sequence[Tensor], most: float, order: float, ranks: Communicator | None) -> Tensor:
    """Scale the parts to a total norm of at most `most`; return the norm before. Collective as that is."""
    total = total_norm(parts, order, ranks)
    scale = torch.clamp(most / (total + 1e-6), max=1.0)
    for part in parts:
        part.mul_(scale.to(part.device))
    return total


def as_vector(numbers: Sequence[Tensor]) -> Tensor:
    """As a vector, where the first one is."""
    return torch.stack([number.to(numbers[0].device) for number in numbers])


def _norms_of_blocks(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_cpu:  # twice as fast one by one
        return torch.stack([_vector_norm(block, 2.0, dtype) for block in torch.split(x, BLOCK)])
    whole = x.numel() // BLOCK * BLOCK
    norms = _vector_norm(x[:whole].view(-1, BLOCK), 2.0, dtype, dim=1)
    rest = [_vector_norm(x[whole:], 2.0, dtype).view(1)] if whole < x.numel() else []
    return torch.cat([norms, *rest])


def _vector_norm(x: Tensor, order: float, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    # torch has no types for it.
    return torch.linalg.vector_norm(x, order, dim, dtype=dtype)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
