"""Means of quantized vectors: an all-to-all and an allgather, with sums in float32 between them.

Each of n ranks has a vector of n pieces.

    all-to-all   rank i quantizes piece p of its vector and sends it to rank p
    mean         rank p decodes what it received, and averages the n versions of piece p in rank order
    allgather    if all ranks need the mean: rank p quantizes its mean and sends it to all ranks; all, also
                 rank p, decode the same bytes

A rank does not send to itself, but uses its own version of its own piece unquantized. Afterwards the input
vector holds the quantization errors. Its pieces for other ranks hold the errors of what this rank sent them.
Its own piece holds the error of the quantized mean, times n. So in every piece, the result plus the mean of
the errors over the ranks is the exact mean of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpcsgd.comm import Communicator, accumulation_dtype
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.parts.quantizers.base import Quantizer

NoiseFor = Callable[[int], int]
"""A function that returns noise, different for each number that it gets: 0, 1, …."""


def mean_of_own(x: Tensor, ranks: Communicator, wire: Quantizer, dice: NoiseFor) -> Tensor:
    """Return the mean over `ranks` of this rank's piece of `x`. Collective.

    `x` is float32 or float64 and has `ranks.size` equal pieces. It is overwritten with the quantization
    errors.
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
    """Return the mean of `x` over `ranks`, the same bits on all ranks. Collective.

    `x` is overwritten with the quantization errors.
    """
    mean = mean_of_own(x, ranks, wire, dice)
    arrived = gathered(mean, ranks, wire, dice(ranks.size))
    mine = slice(ranks.rank * mean.numel(), (ranks.rank + 1) * mean.numel())
    x[mine] = (mean - arrived[mine]) * ranks.size
    return arrived


def gathered(x: Tensor, ranks: Communicator, wire: Quantizer, dice: int) -> Tensor:
    """Quantize `x` and gather it from all `ranks`; return the decoded vectors, joined. Collective."""
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
