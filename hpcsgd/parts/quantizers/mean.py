"""Means of vectors that travel packed: as an all-to-all and an allgather, with the sums in float32 between.

    rank i sends piece p of its vector to rank p, packed; rank p makes the mean of its piece, in rank order;
    where all are to have it, rank p packs the mean and sends it to all, which unpack the same bytes, it too

A rank does not send to itself: of its own piece it takes its own elements as they are. So a vector has room
for all that was lost: in the pieces of others what rounding took from what they were sent, in the own piece
what it took from the mean, times the ranks. The mean over the ranks of what was lost is what the mean lacks,
piece by piece: that of what was sent plus that of what was lost is that of what was given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpcsgd.comm import Communicator, accumulation_dtype
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.parts.quantizers.base import Quantizer

NoiseFor = Callable[[int], int]
"""For each number from 0 on others."""


def mean_of_own(x: Tensor, ranks: Communicator, wire: Quantizer, dice: NoiseFor) -> Tensor:
    """The mean over the `ranks` of the own one of `ranks.size` pieces of `x`; leaves in `x` what was lost.

    `x`: float32 or float64, equal pieces. Collective.
    """
    mine, rows = ranks.rank, x.view(ranks.size, -1)
    codes = x.new_zeros((ranks.size, wire.nbytes(rows.size(1))), dtype=torch.uint8)
    for i, (row, code) in enumerate(zip(rows, codes, strict=True)):
        if i != mine:
            wire.encode(row.float(), code, dice(i))
    received = torch.empty_like(codes)
    ranks.alltoall(received.view(-1), codes.view(-1)).wait()
    versions = torch.empty_like(rows)
    for i, (version, code) in enumerate(zip(versions, received, strict=True)):
        version.copy_(rows[mine] if i == mine else decoded(code, version.numel(), wire))
    for i, (row, code) in enumerate(zip(rows, codes, strict=True)):
        if i == mine:
            row.zero_()
        else:
            row.sub_(decoded(code, row.numel(), wire))
    return versions.mean(0)


def mean_on_all(x: Tensor, ranks: Communicator, wire: Quantizer, dice: NoiseFor) -> Tensor:
    """The mean of `x` over the `ranks`, the same bits on all; leaves in `x` what was lost. Collective."""
    mean = mean_of_own(x, ranks, wire, dice)
    arrived = gathered(mean, ranks, wire, dice(ranks.size))
    mine = slice(ranks.rank * mean.numel(), (ranks.rank + 1) * mean.numel())
    x[mine] = (mean - arrived[mine]) * ranks.size
    return arrived


def gathered(x: Tensor, ranks: Communicator, wire: Quantizer, dice: int) -> Tensor:
    """The vectors of all `ranks`, of equal length, as they arrive; the own one, too. Collective."""
    code = x.new_zeros(wire.nbytes(x.numel()), dtype=torch.uint8)
    wire.encode(x.float(), code, dice)
    codes = code.new_empty((ranks.size, code.numel()))
    ranks.allgather(codes.view(-1), code).wait()
    out = x.new_empty((ranks.size, x.numel()))
    for row, each in zip(out, codes, strict=True):
        row.copy_(decoded(each, x.numel(), wire))
    return out.view(-1)


def padded(x: Tensor, n: int) -> Tensor:
    """A copy, in float32 at least, with zeros up to a multiple of `n`."""
    room = x.new_zeros(-(-x.numel() // n) * n, dtype=accumulation_dtype(x.dtype))
    room[: x.numel()] = x
    return room


def sent_by_mean(wire: Quantizer, size: int, m: ModelLayout) -> list[CommOp]:
    """By `mean_on_all` of `size` elements over the groups."""
    codes = m.P * wire.nbytes(-(-size // m.P))
    return [CommOp("alltoall", "cross", codes), CommOp("allgather", "cross", codes)]


def decoded(code: Tensor, n: int, wire: Quantizer) -> Tensor:
    out = torch.empty(n, dtype=torch.float32, device=code.device)
    wire.decode(code, out)
    return out
