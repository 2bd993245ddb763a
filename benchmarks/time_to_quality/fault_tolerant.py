"""torchft's contestants of `time_to_quality.py`: every rank is a replica group of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn, optim
from torchft.local_sgd import DiLoCo, LocalSGD  # pyright: ignore[reportMissingImports]

import hpcsgd
from step_time.fault_tolerant import manager

if TYPE_CHECKING:
    from time_to_quality.contestants import Make, Start, Update


def local_sgd(every: int) -> Make:
    def make(start: Start, topology: hpcsgd.Topology) -> Update:
        optimizer = start.optimizer()
        LocalSGD(manager(topology), start.model, optimizer, every).__enter__()
        return start.update(start.model, optimizer, optimizer)

    return make


def diloco(every: int, outer: Callable[[Iterable[Tensor]], optim.Optimizer]) -> Make:
    """Return DiLoCo without streaming: it has one fragment and no delay."""

    def make(start: Start, topology: hpcsgd.Topology) -> Update:
        inner, whole = start.optimizer(), list[nn.Module]([start.model])
        outside = outer(start.model.parameters())
        DiLoCo(manager(topology), whole, inner, outside, every, use_bucketization=True).__enter__()
        return start.update(start.model, inner, inner)

    return make
