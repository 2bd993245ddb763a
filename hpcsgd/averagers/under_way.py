"""A meeting that goes on while its groups train: an averager has copies of chunks, and a lane of its own.

It sees a `Step` like any other one. The chunks of that are the copies, and its job is the same ranks on
communicators and a lane apart, so that the gradients of later steps are not queued behind it. When what has
become of the copies is taken into the model, and how, is the business of whoever began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import Fixed, Step
from hpcsgd.core.topology import Job
from hpcsgd.transport import Work, phase


@dataclass(frozen=True)
class Chunk:
    """As much of a bucket as an averager of chunks may see."""

    own: Tensor

    @property
    def filled(self) -> list[slice]:
        """All of it: padding belongs to no fragment."""
        return [slice(0, self.own.numel())]


@dataclass
class Meeting:
    """One under way, or over where there is no `work` left."""

    due: int
    """The update after which what came of it is taken in."""
    chunks: list[Tensor]
    """What was brought to it; what it has left, once it was waited for."""
    notes: dict[str, float]
    """The averager's."""
    work: Work | None = None

    def wait(self) -> None:
        """Return when it is over."""
        if self.work is not None:
            self.work.wait()
            self.work = None


def apart(job: Job) -> Job:
    """The same ranks on communicators of their own, which share a lane; collective."""
    world = job.world.apart()
    group, cross = (ranks.split(0, ranks.rank).on(world.lane) for ranks in (job.group, job.cross))
    return replace(job, world=world, group=group, cross=cross)


def step_of(s: Step, job: Job, chunks: Sequence[Tensor]) -> Step:
    """`s` as it is seen by an averager of these `chunks` alone."""
    buckets = cast("Sequence[Bucket]", [Chunk(x) for x in chunks])
    return Step(Fixed(job, buckets, moments=s.moments), t=s.t, rates=s.rates)


def under_way(how: Callable[[Step], None], s: Step, job: Job, chunks: list[Tensor], due: int) -> Meeting:
    """Hand `chunks`, copies of what this group has after the update, to `how` on the lane of `job`."""
    mine = step_of(s, job, chunks)
    with phase("average"):
        work = job.cross.run(lambda: how(mine), "a meeting under way", *chunks)
    return Meeting(due, chunks, mine.notes, work)
