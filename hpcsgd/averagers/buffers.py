"""Float buffers (batch-norm statistics): every rank has its own, and evaluated is their mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpcsgd.transport import Transport


def average_buffers(
    buffers: Sequence[Tensor],
    ranks: Transport,
    further: Callable[[Sequence[Tensor]], None] = lambda joined: None,
) -> None:
    """They become their mean over all `ranks`, and then what `further` makes of that; collective.

    `further` is given them joined, a vector for every dtype.
    """
    dtypes = dict.fromkeys(buffer.dtype for buffer in buffers)
    alike = [[buffer for buffer in buffers if buffer.dtype == dtype] for dtype in dtypes]
    joined = [torch.cat([buffer.reshape(-1) for buffer in of_dtype]) for of_dtype in alike]
    for vector in joined:
        ranks.allreduce(vector, "mean").wait()
    further(joined)
    for of_dtype, vector in zip(alike, joined, strict=True):
        for buffer, mean in zip(of_dtype, vector.split([b.numel() for b in of_dtype]), strict=True):
            buffer.copy_(mean.view_as(buffer))
