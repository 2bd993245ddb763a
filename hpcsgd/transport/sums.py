"""Sums of what a library only moves: made here, by torch, where the tensors are.

In float32 for the 16-bit floats, rounded once, and in the order of the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcsgd.transport.backend import Backend, Reduction, wide


def reduce_scatter(ranks: Backend, out: Tensor, x: Tensor, reduction: Reduction) -> None:
    """As `Backend.reduce_scatter`, by one all-to-all and room for another `x`."""
    received = torch.empty_like(x)
    ranks.alltoall(received, x)
    _reduce_rows(received.view(ranks.size, -1), out, reduction)


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
    return wide(x.dtype) != x.dtype


def _reduce_rows(rows: Tensor, out: Tensor, reduction: Reduction) -> None:
    if reduction == "max":
        torch.amax(rows, 0, out=out.view(-1))
        return
    total = rows.sum(0, dtype=wide(rows.dtype))
    out.view(-1).copy_(total / len(rows) if reduction == "mean" else total)
