"""What happens to the optimizer's moments (momentum, second moments) when groups meet.

The paper leaves it open. Kept is what local SGD codes do; Averaged costs another M/K for every state
tensor; Reset starts each round afresh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcsgd.step import Averager, Step
from hpcsgd.transport import phase


def kept(inner: Averager) -> Averager:
    """`inner` alone: every group goes on with its own moments."""
    return inner


@dataclass(frozen=True)
class Averaged:
    """`inner`, then the mean of every state tensor over the groups."""

    inner: Averager

    @property
    def shards(self) -> bool:
        return self.inner.shards

    def before_update(self, s: Step) -> None:
        self.inner.before_update(s)

    def __call__(self, s: Step) -> None:
        self.inner(s)
        with phase("moments"):
            for tensors in s.moments.tensors().values():
                joined = torch.cat([x.reshape(-1) for x in tensors])
                s.job.cross.allreduce(joined).wait()
                joined.div_(s.job.P)
                pieces = joined.split([x.numel() for x in tensors])
                for x, mean in zip(tensors, pieces, strict=True):
                    x.copy_(mean.view_as(x))


@dataclass(frozen=True)
class Reset:
    """`inner`, then every state tensor is zero."""

    inner: Averager

    @property
    def shards(self) -> bool:
        return self.inner.shards

    def before_update(self, s: Step) -> None:
        self.inner.before_update(s)

    def __call__(self, s: Step) -> None:
        self.inner(s)
        for tensors in s.moments.tensors().values():
            for x in tensors:
                x.zero_()
