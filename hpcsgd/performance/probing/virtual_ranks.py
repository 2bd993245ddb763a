"""The batches and random states of virtual ranks, which equal those of real ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized

import torch
from torch import Tensor

from hpcsgd.comm.streams import HOST
from hpcsgd.core.generators import generators_state, seed_generators
from hpcsgd.data import AsRank, Batches, Sampler, require_a_batch
from hpcsgd.performance.probing import replicas
from hpcsgd.performance.probing.replicas import VirtualRank

Load = Callable[[Sequence[int]], tuple[Tensor, Tensor]]
"""A function that returns the samples with the given indices as one batch."""


def virtual_rank(
    data: Sized, load: Load, batch: int, rank: int, size: int, seed: int, device: torch.device = HOST
) -> VirtualRank:
    """Return virtual rank `rank` of `size`, whose batches of `batch` samples go on epoch after epoch."""
    seed_generators(seed + 1 + rank)
    sampler = Sampler(data, AsRank(rank, size), seed=seed)
    batches = Batches(sampler, batch)
    require_a_batch(batches)
    return VirtualRank(_loaded(batches, load), generators_state(device))


def _loaded(batches: Batches, load: Load) -> replicas.Batches:
    epoch = 0
    while True:
        batches.sampler.set_epoch(epoch)
        yield from map(load, batches)
        epoch += 1
