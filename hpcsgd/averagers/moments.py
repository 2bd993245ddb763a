"""What happens to the optimizer's moments (momentum, second moments) when groups meet.

The paper leaves it open. Kept is what local SGD codes do; Averaged costs another M/K for every state
tensor; Reset starts each round afresh.

A group that has never had a gradient for a parameter has no state for it. Averaged counts there what the
optimizer would start from, and so the numbers of a whole parameter (how many steps it has seen) are averaged
with its moments: those of Adam divide by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpcsgd.averagers.joined import average_joined, require_same_layout
from hpcsgd.core.step import Averager, Step
from hpcsgd.transport import phase

AroundMoments = Callable[[Averager], Averager]
"""Makes of an averager one that does something about the moments, too."""


def kept(inner: Averager) -> Averager:
    """`inner` alone: every group goes on with its own moments."""
    return inner


@dataclass(frozen=True)
class Averaged:
    """`inner`, then the mean of every state tensor over the groups, and of every number that is a tensor."""

    inner: Averager

    @property
    def shards(self) -> bool:
        return self.inner.shards

    def before_update(self, s: Step) -> None:
        self.inner.before_update(s)

    def __call__(self, s: Step) -> None:
        self.inner(s)
        named = s.moments.tensors()
        with phase("moments"):
            require_same_layout(named, s.job.cross, "the optimizers' state tensors")
            for tensors in named.values():
                average_joined(tensors, s.job.cross)


@dataclass(frozen=True)
class Reset:
    """`inner`, then the optimizer has the state of a new one: that is not always zeros."""

    inner: Averager

    @property
    def shards(self) -> bool:
        return self.inner.shards

    def before_update(self, s: Step) -> None:
        self.inner.before_update(s)

    def __call__(self, s: Step) -> None:
        self.inner(s)
        s.moments.reset()


MOMENTS: Mapping[str, AroundMoments] = {"averaged": Averaged, "kept": kept, "reset": Reset}
"""As job files call them."""
