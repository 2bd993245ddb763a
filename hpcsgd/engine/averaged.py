"""The model that is evaluated is the mean of the groups' models, or a server's: this makes it for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

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
    its float buffers the mean over all ranks; afterwards everything is as before, bit for bit. Collective;
    takes room for another w, of what this rank has of it.

    Gives D, how far the groups are from that model (see `averagers.distance`).
    """
    parameters = [(b.w, b.w.clone()) for b in s.buckets] if s.job.P > 1 else []
    buffers = [(buffer, buffer.clone()) for buffer in s.buffers]
    with torch.no_grad(), phase("evaluation"):
        D = _agree(s, central) if s.job.P > 1 else 0.0
        if s.job.size > 1:
            average_joined(s.buffers, s.job.world)
    try:
        yield D
    finally:
        reshard(model)
        with torch.no_grad():
            for tensor, before in parameters + buffers:
                tensor.copy_(before)


def _agree(s: Step, central: Central | None) -> float:
    """All groups get that model; D is how far they were from it."""
    mine = [chunk.clone() for chunk in s.owned]
    agree(s, central)
    D = distance(s, mine, s.owned, shards=True)
    gather_chunks(s)
    return D
