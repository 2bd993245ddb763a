"""Means of quantized vectors: an all-to-all and an allgather, with sums in float32 between them.

    rank i sends piece p of its vector to rank p, packed; rank p makes the mean of its piece, in rank order;
    if all ranks need it, rank p packs the mean and sends it to all; all unpack the same bytes, rank p, too

Packed means quantized. A rank does not send to itself, but uses its own elements of its own piece
unquantized. After use, the input vector holds the quantization errors. Its pieces for other ranks hold the
errors of what this rank sent them. Its own piece holds the error of the packed mean, times the number of
ranks. So in every piece, the result plus the mean of the errors over the ranks is the exact mean of the
inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpcsgd.comm import Communicator, accumulation_dtype
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.parts.quantizers.base import Quantizer

NoiseFor = Callable[[int], int]
"""A function that returns different noise for each number from 0 on."""


def mean_of_own(x: Tensor, ranks: Communicator, wire: Quantizer, dice: NoiseFor) -> Tensor:
    """Return the mean over `ranks` of this rank's piece of `x`; replace `x` with the errors. Collective.

    `x` is float32 or float64 and has `ranks.size` equal pieces.
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
    """Return the mean of `x` over `ranks`, the same bits on all; replace `x` with the errors. Collective."""
    mean = mean_of_own(x, ranks, wire, dice)
    arrived = gathered(mean, ranks, wire, dice(ranks.size))
    mine = slice(ranks.rank * mean.numel(), (ranks.rank + 1) * mean.numel())
    x[mine] = (mean - arrived[mine]) * ranks.size
    return arrived


def gathered(x: Tensor, ranks: Communicator, wire: Quantizer, dice: int) -> Tensor:
    """Gather the quantized `x` of all `ranks` and return them, decoded, as one vector. Collective."""
    code = x.new_zeros(wire.nbytes(x.numel()), dtype=torch.uint8)
    wire.encode(x.float(), code, dice)
    codes = code.new_empty((ranks.size, code.numel()))
    ranks.allgather(codes.view(-1), code).wait()
    out = x.new_empty((ranks.size, x.numel()))
    for row, each in zip(out, codes, strict=True):
        row.copy_(decoded(each, x.numel(), wire))
    return out.view(-1)


def padded(x: Tensor, n: int) -> Tensor:
    """Return a copy of `x` in float32 or wider, padded with zeros to a multiple of `n` elements."""
    room = x.new_zeros(-(-x.numel() // n) * n, dtype=accumulation_dtype(x.dtype))
    room[: x.numel()] = x
    return room


def sent_by_mean(wire: Quantizer, size: int, m: ModelLayout) -> list[CommOp]:
    """Return the operations of `mean_on_all` over the groups, for vectors of `size` elements."""
    codes = m.P * wire.nbytes(-(-size // m.P))
    return [CommOp("alltoall", "inter_group", codes), CommOp("allgather", "inter_group", codes)]


def decoded(code: Tensor, n: int, wire: Quantizer) -> Tensor:
    out = torch.empty(n, dtype=torch.float32, device=code.device)
    wire.decode(code, out)
    return out
