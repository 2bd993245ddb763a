"""Time single training steps of a job file's model, which each rank trains alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from torch import Tensor

from hpcsgd.comm import Communicator
from hpcsgd.config.schema import Config, MethodSection, unsharded
from hpcsgd.core.elements import num_reals
from hpcsgd.core.topology import form
from hpcsgd.performance.measuring.timing import clock
from hpcsgd.train.training_setup import TrainingSetup, assemble

BATCHES = 4
"""The largest number of batch sizes to time. If there are more, the smallest are timed."""


class Workload:
    """The steps of a job file's training, without communication.

    `source` is the job file's path. The constructor raises the errors of `assemble`.
    """

    def __init__(self, config: Config, source: str, world: Communicator) -> None:
        self.batch_sizes = _batch_sizes(config.data.group_batch_size, world.size)
        alone = form(world.split(world.rank, 0))
        self._parts: TrainingSetup = assemble(_by_itself(config, self.batch_sizes[0]), alone, source)
        self.device = self._parts.device
        self.numel = num_reals(p for p in self._parts.model.parameters() if p.requires_grad)
        self._samples = {b: self._load(b) for b in self.batch_sizes}
        self._parts.model.train()

    def step(self, batch: int) -> Sequence[float]:
        """Make a step with `batch` samples, and return the seconds of forward, backward and update."""
        parts = self._parts
        x, y = parts.vary(*self._samples[batch])
        parts.optimizer.zero_grad()
        times = [clock(self.device)]
        with parts.precision.computing():
            loss = parts.task.loss(parts.model(x), y)
        times.append(clock(self.device))
        parts.precision.backward(loss)
        times.append(clock(self.device))
        parts.precision.step(parts.optimizer, loss=loss)
        times.append(clock(self.device))
        return [after - before for before, after in itertools.pairwise(times)]

    def _load(self, batch: int) -> tuple[Tensor, Tensor]:
        train = self._parts.train
        places = [place % len(train) for place in range(batch)]
        return train.collate(train.__getitems__(places))


def _batch_sizes(B: int, N: int) -> list[int]:
    """Return the batch sizes of a rank, B / K, for all group sizes K that `N` ranks allow."""
    return sorted(B // K for K in range(1, N + 1) if N % K == 0 and B % K == 0)[:BATCHES]


def _by_itself(config: Config, batch: int) -> Config:
    """Return `config` for a single rank, with a learning rate so small that nothing diverges."""
    data = dataclasses.replace(
        config.data,
        group_batch_size=batch,
        partition=None,
        overlap_share=None,
        injection=None,
        num_workers=0,
    )
    optimizer = dataclasses.replace(config.optimizer, lr=1e-9)
    return dataclasses.replace(
        unsharded(config), data=data, optimizer=optimizer, method=MethodSection(name="bsp")
    )
