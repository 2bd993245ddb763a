"""An average that is made while the groups train, from copies of the shards, on a separate thread.

The averager gets a `StepContext` as usual, but the topology in this context has separate communicators and a
separate communication thread. So the gradients of later steps do not wait behind the average. The context
also has separate metrics. The caller decides when and how the result is applied to the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from hpcsgd.comm import Work, phase
from hpcsgd.core.step import StepContext
from hpcsgd.core.topology import Topology

Average = Callable[[list[Tensor], StepContext], object]
"""A function that averages a rank's vectors over the groups, in place."""


@dataclass
class PendingAverage:
    """An average of this rank's shards over the groups, in progress or finished."""

    due: int
    """The update after which the result is used."""
    shards: list[Tensor]
    """The vectors to average, which hold the result after `wait`."""
    metrics: dict[str, float]
    """The averager's metrics."""
    left_out: tuple[int, ...] = ()
    """After `wait`: the groups that the averager left out, by their index."""
    work: Work | None = None
    """The operation in progress; None if the average is finished."""

    def wait(self) -> None:
        """Wait until the average is finished, so that `shards` and `metrics` have the result."""
        if self.work is not None:
            self.work.wait()
            self.work = None


def on_own_thread(topology: Topology) -> Topology:
    """Return `topology` with separate communicators of the same ranks, on one new communication thread.

    Collective.
    """
    world = topology.world.dup_with_thread()
    intra_group, inter_group = (
        ranks.split(0, ranks.rank).with_thread(world.comm_thread)
        for ranks in (topology.intra_group, topology.inter_group)
    )
    return replace(topology, world=world, intra_group=intra_group, inter_group=inter_group)


def step_on_own_thread(s: StepContext, topology: Topology) -> StepContext:
    """Return a copy of `s` with the communicators of `topology`, and with separate metrics."""
    return replace(
        s, fixed=replace(s.fixed, topology=topology), metrics={}, squared_distance=None, left_out=()
    )


def begin(
    average: Average, s: StepContext, topology: Topology, vectors: list[Tensor], due: int
) -> PendingAverage:
    """Start `average` on `vectors`, on the communication thread of `topology`.

    `vectors` are copies of this rank's vectors after the update; `due` is the update after which to use them.
    """
    mine = step_on_own_thread(s, topology)
    pending = PendingAverage(due, vectors, mine.metrics)

    def act() -> None:
        average(vectors, mine)
        pending.left_out = mine.left_out

    with phase("model_average"):
        pending.work = topology.inter_group.run(act, "a pending average", *vectors)
    return pending
