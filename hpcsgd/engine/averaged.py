"""The model that is evaluated is the mean of the groups' models, or a server's: this makes it for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn

from hpcsgd.averagers import agree, average_joined
from hpcsgd.averagers.distance import distance
from hpcsgd.core.method import Central
from hpcsgd.core.shards import reshard
from hpcsgd.core.step import Step
from hpcsgd.engine.meeting import gather_chunks
from hpcsgd.transport import phase


def float_buffers(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


@contextlib.contextmanager
def averaged(s: Step, central: Central | None, model: nn.Module) -> Generator[float, None, None]:
    """Inside the block the parameters of `model` are the mean over the groups, or what `central` keeps, and
    its float buffers the mean over all ranks. Afterwards these are as before, bit for bit, whatever the block
    has written into them, also where there is one group. Collective; a copy of w is kept for that, of what
    this rank has of it.

    Gives D, how far the groups are from that model (see `averagers.distance`).
    """
    brought = [b.w.clone() for b in s.buckets]
    parameters = [(b.w, w) for b, w in zip(s.buckets, brought, strict=True)]
    buffers = [(buffer, buffer.clone()) for buffer in s.buffers]
    with torch.no_grad(), phase("evaluation"):
        D = _agree(s, central, brought) if s.job.P > 1 else 0.0
        if s.job.size > 1:
            average_joined(s.buffers, s.job.world)
    try:
        yield D
    finally:
        reshard(model)
        with torch.no_grad():
            for tensor, before in parameters + buffers:
                tensor.copy_(before)


def _agree(s: Step, central: Central | None, brought: Sequence[Tensor]) -> float:
    """All groups get that model; D is how far they, with what they `brought`, were from it."""
    agree(s, central)
    mine = [b.own_of(w) for b, w in zip(s.buckets, brought, strict=True)]
    D = distance(s, mine, s.owned, shards=True)
    gather_chunks(s)
    return D
