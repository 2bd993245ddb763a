"""Norms of long vectors, at memory speed and with an accurate sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hpcsgd.comm import Communicator, accumulation_dtype

BLOCK = 1 << 16
"""Elements per block. A single float32 sum of tens of millions of squares is wrong in the third digit. Sums
in float64 only would take many times as long."""


def squared_norm(x: Tensor) -> Tensor:
    """Return ‖x‖² as float64.

    Squares are added in float32 (float64 for float64) within each block, and the blocks' sums in float64.
    """
    norms = _norms_of_blocks(x.reshape(-1), accumulation_dtype(x.dtype))
    return norms.double().square().sum()


def norm(x: Tensor, order: float = 2.0) -> Tensor:
    """Return the norm of `x` of the given order, in float64; for complex numbers, of absolute values."""
    if not x.numel():
        return torch.zeros((), dtype=torch.float64, device=x.device)
    if order == 2:
        return squared_norm(x).sqrt()
    return _vector_norm(x, order, torch.complex128 if x.is_complex() else torch.float64)


def sum_on_host(numbers: Iterable[Tensor]) -> Tensor:
    """Return the sum of float64 `numbers`, added in their order on the host; waits for a device once."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for number in as_vector(list(numbers)).cpu():
        total += number
    return total


def total_norm(parts: Sequence[Tensor], order: float, ranks: Communicator | None) -> Tensor:
    """Return the norm of all `parts` together.

    With `ranks` it includes the parts of all those ranks: collective, with an allreduce of 8 bytes.
    """
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
    """Scale `parts` to a total norm of at most `most`, and return the norm that they had before.

    With `ranks` the norm includes the parts of all those ranks: collective.
    """
    total = total_norm(parts, order, ranks)
    scale = torch.clamp(most / (total + 1e-6), max=1.0)
    for part in parts:
        part.mul_(scale.to(part.device))
    return total


def as_vector(numbers: Sequence[Tensor]) -> Tensor:
    """Return the numbers as a vector on the device of the first one."""
    return torch.stack([number.to(numbers[0].device) for number in numbers])


def _norms_of_blocks(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_cpu:  # on a CPU one call per block is twice as fast as one call for all
        return torch.stack([_vector_norm(block, 2.0, dtype) for block in torch.split(x, BLOCK)])
    whole = x.numel() // BLOCK * BLOCK
    norms = _vector_norm(x[:whole].view(-1, BLOCK), 2.0, dtype, dim=1)
    rest = [_vector_norm(x[whole:], 2.0, dtype).view(1)] if whole < x.numel() else []
    return torch.cat([norms, *rest])


def _vector_norm(x: Tensor, order: float, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    # torch has no types for this function.
    return torch.linalg.vector_norm(x, order, dim, dtype=dtype)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
