"""A meeting that goes on while its groups train: an averager has copies of chunks, and a lane of its own.

It sees a `Step` like any other one, but its job is the same ranks on communicators and a lane apart, so that
the gradients of later steps are not queued behind it, and its notes are its own. When what has become of the
copies is taken into the model, and how, is the business of whoever began.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from hpcsgd.comm import Work, phase
from hpcsgd.core.step import StepContext
from hpcsgd.core.topology import Topology

Average = Callable[[list[Tensor], StepContext], object]
"""Averages vectors in place."""


@dataclass
class PendingAverage:
    """One under way, or over where there is no `work` left."""

    due: int
    """The update after which what came of it is taken in."""
    shards: list[Tensor]
    """What was brought to it; what it has left, once it was waited for."""
    notes: dict[str, float]
    """The averager's."""
    work: Work | None = None

    def wait(self) -> None:
        """Return when it is over."""
        if self.work is not None:
            self.work.wait()
            self.work = None


def on_own_thread(topology: Topology) -> Topology:
    """The same ranks on communicators of their own, which share a lane; collective."""
    world = topology.world.dup_with_thread()
    group, cross = (
        ranks.split(0, ranks.rank).with_thread(world.comm_thread)
        for ranks in (topology.intra_group, topology.inter_group)
    )
    return replace(topology, world=world, intra_group=group, inter_group=cross)


def step_on_own_thread(s: StepContext, topology: Topology) -> StepContext:
    """`s` as it is seen by an averager of copies, or of parts of vectors, on the ranks of `job`."""
    return replace(s, fixed=replace(s.fixed, topology=topology), metrics={}, squared_distance=None)


def begin(
    average: Average, s: StepContext, topology: Topology, vectors: list[Tensor], due: int
) -> PendingAverage:
    """Hand `vectors`, copies of what this group has after the update, to `average` on the lane of `job`."""
    mine = step_on_own_thread(s, topology)
    with phase("average"):
        work = topology.inter_group.run(lambda: average(vectors, mine), "a meeting under way", *vectors)
    return PendingAverage(due, vectors, mine.metrics, work)
