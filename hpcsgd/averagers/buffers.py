"""Float buffers (batch-norm statistics): every rank has its own, and evaluated is their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcsgd.transport import Transport


def average_buffers(buffers: Sequence[Tensor], ranks: Transport) -> None:
    """They become their mean over all ranks; collective."""
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        alike = [buffer for buffer in buffers if buffer.dtype == dtype]
        joined = torch.cat([buffer.reshape(-1) for buffer in alike])
        ranks.allreduce(joined).wait()
        joined.div_(ranks.size)
        for buffer, mean in zip(alike, joined.split([b.numel() for b in alike]), strict=True):
            buffer.copy_(mean.view_as(buffer))
