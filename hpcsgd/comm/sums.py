"""Sums of what a library only moves: made here, by torch, where the tensors are.

In float32 for the 16-bit floats, rounded once, and in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcsgd.comm.backend import Backend, Reduction, accumulation_dtype


def reduce_scatter(ranks: Backend, out: Tensor, x: Tensor, reduction: Reduction) -> None:
    """As `Backend.reduce_scatter`, by one all-to-all and room for another `x`."""
    received = torch.empty_like(x)
    ranks.alltoall(received, x)
    reduce_into(out.view(-1), received.view(ranks.size, -1).unbind(), reduction)


def allreduce(ranks: Backend, x: Tensor, reduction: Reduction) -> None:
    """As `Backend.allreduce`: all-to-all, everybody's own run, allgather."""
    share = -(-x.numel() // ranks.size)
    padded = x.new_zeros(share * ranks.size)
    padded[: x.numel()] = x.view(-1)
    mine = x.new_empty(share)
    reduce_scatter(ranks, mine, padded, reduction)
    ranks.allgather(padded, mine)
    x.view(-1).copy_(padded[: x.numel()])


def is_narrow(x: Tensor) -> bool:
    """Whether sums of it are made in a wider type."""
    return accumulation_dtype(x.dtype) != x.dtype


def reduced(xs: Sequence[Tensor], reduction: Reduction) -> Tensor:
    """The sum, mean or max of tensors, one after the other, in the type that they have."""
    out = torch.empty_like(xs[0])
    reduce_into(out, xs, reduction)
    return out


def reduce_into(out: Tensor, xs: Sequence[Tensor], reduction: Reduction) -> None:
    """As `reduced`, where `out` is none of the tensors."""
    total = out.to(accumulation_dtype(out.dtype))  # the same, but for 16 bits
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
