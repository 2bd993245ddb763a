"""The model that local SGD trains is the mean of its groups' models: this makes it for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hpcsgd.averagers import Mean
from hpcsgd.averagers.distance import distance
from hpcsgd.step import Step
from hpcsgd.transport import Transport, phase


def gather_chunks(s: Step) -> None:
    """w ← the chunks that the positions of the group own; collective over the group."""
    if s.job.K > 1:
        works = [s.job.group.allgather(b.w, b.own) for b in s.buckets]
        for work in works:
            work.wait()


def average_buffers(model: nn.Module, world: Transport) -> None:
    """Float buffers (batch-norm statistics) become their mean over all ranks; collective. Others stay."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        alike = [buffer for buffer in buffers if buffer.dtype == dtype]
        joined = torch.cat([buffer.reshape(-1) for buffer in alike])
        world.allreduce(joined).wait()
        joined.div_(world.size)
        for buffer, mean in zip(alike, joined.split([b.numel() for b in alike]), strict=True):
            buffer.copy_(mean.view_as(buffer))


@contextlib.contextmanager
def averaged(model: nn.Module, s: Step) -> Iterator[float]:
    """Inside the block the model's parameters are the mean over the groups and its float buffers the mean
    over all ranks; afterwards everything is as before, bit for bit. Collective; takes room for another w.

    Gives D, how far the groups are from their mean (see `averagers.distance`).
    """
    D = 0.0
    parameters: list[tuple[Tensor, Tensor]] = []
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if buffer.is_floating_point()]
    with torch.no_grad(), phase("evaluation"):
        if s.job.P > 1:
            parameters = [(b.w, b.w.clone()) for b in s.buckets]
            mine = [chunk.clone() for chunk in s.owned]
            Mean()(s)
            D = distance(s, mine, s.owned, shards=True)
            gather_chunks(s)
        if s.job.size > 1:
            average_buffers(model, s.job.world)
    try:
        yield D
    finally:
        with torch.no_grad():
            for tensor, before in parameters + buffers:
                tensor.copy_(before)
