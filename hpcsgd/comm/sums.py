"""Sums for libraries that only move data. torch computes them on the device of the tensors.

Sums of 16-bit floats are computed in float32, in the order of the ranks, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcsgd.comm.backend import Backend, Reduction, accumulation_dtype


def reduce_scatter(ranks: Backend, out: Tensor, x: Tensor, reduction: Reduction) -> None:
    """Do what `Backend.reduce_scatter` does, by one all-to-all; needs as much memory as `x` in addition."""
    received = torch.empty_like(x)
    ranks.alltoall(received, x)
    reduce_into(out.view(-1), received.view(ranks.size, -1).unbind(), reduction)


def allreduce(ranks: Backend, x: Tensor, reduction: Reduction) -> None:
    """Do what `Backend.allreduce` does, by an all-to-all, a sum of each rank's own part, and an allgather."""
    share = -(-x.numel() // ranks.size)
    padded = x.new_zeros(share * ranks.size)
    padded[: x.numel()] = x.view(-1)
    mine = x.new_empty(share)
    reduce_scatter(ranks, mine, padded, reduction)
    ranks.allgather(padded, mine)
    x.view(-1).copy_(padded[: x.numel()])


def is_narrow(x: Tensor) -> bool:
    """Return True if sums of `x` are computed in a wider dtype."""
    return accumulation_dtype(x.dtype) != x.dtype


def reduced(xs: Sequence[Tensor], reduction: Reduction) -> Tensor:
    """Return the sum, mean or maximum of the tensors `xs`, added in their order, in their own dtype."""
    out = torch.empty_like(xs[0])
    reduce_into(out, xs, reduction)
    return out


def reduce_into(out: Tensor, xs: Sequence[Tensor], reduction: Reduction) -> None:
    """Write the result of `reduced` into `out`, which is none of the tensors `xs`."""
    total = out.to(accumulation_dtype(out.dtype))  # the same dtype, except for 16-bit floats
    total.copy_(xs[0])
    for x in xs[1:]:
        if reduction == "max":
            torch.maximum(total, x.to(total.dtype), out=total)
        else:
            total += x
    if reduction == "mean":
        total /= len(xs)
    if total is not out:
        out.copy_(total)
