"""The interface through which other code uses elastic groups: jobs that average with this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hpcsgd.comm.alike import Fact


class Facts(Protocol):
    """What the jobs learn of each other before they average."""

    @property
    def norms(self) -> Mapping[int, Sequence[float]]:
        """The `norms` of each job in the mean, by index."""
        ...

    @property
    def weights(self) -> Mapping[int, Sequence[float]]:
        """The `weights` of each job in the mean, by index."""
        ...

    @property
    def t(self) -> int:
        """The updates that the jobs have done that have missed no round."""
        ...

    @property
    def part(self) -> int | None:
        """The index of the part to average; None: all parts."""
        ...


class Contribution(Protocol):
    """What a job adds to a mean in place of its tensors, which may form several parts.

    One call of `ReplicaGroups.mean` averages one part, or all of them.
    """

    norms: Sequence[float]
    """A number of this job for each part, which all jobs get."""
    weights: Sequence[float]
    """The weight of this job in the mean of each part, which all jobs get; empty: all jobs weigh alike."""
    part: int | None
    """The index of the part that this job would average now; None: all parts."""
    shared: Sequence[Tensor]
    """Tensors that are the same in all jobs in the mean. When other jobs begin to average together, they all
    get those of the first job in the mean that has missed no round."""
    late_rounds: int
    """The number of rounds that this job may miss, and still count when it is back; 0: none."""

    def __call__(self, facts: Facts, newest: Sequence[Tensor] = ()) -> Sequence[Tensor | None]:
        """Return the tensors to average, with None in place of those that are not averaged now.

        Their plain mean is taken, so a weight is a factor of them. For a job that has missed rounds, `newest`
        are the `shared` tensors of one that has not; only the part of them that this rank averages is valid.
        May be called again.
        """
        ...


class ReplicaGroups(Protocol):
    """Other jobs, of one group each, that average with this job. Calls are collective in this job."""

    @property
    def index(self) -> int:
        """Index of this job among all the jobs, from 0."""
        ...

    @property
    def count(self) -> int:
        """Number of jobs that were started, including this one."""
        ...

    def require_alike(self, facts: Sequence[Fact]) -> None:
        """Have `mean` raise `JobError` in jobs that were given other `facts` than the others."""
        ...

    def mean(
        self, w: Sequence[Tensor], t: int, *, alike: bool = True, contribution: Contribution | None = None
    ) -> None:
        """Replace `w`, after `t` updates, by its mean over the jobs that are present.

        `alike`: all ranks of this job hold the same `w`. Otherwise each rank holds its own rows of it.
        `contribution` makes the tensors to average in place of `w`. A job that is not in the mean, such as
        one that returns, adds nothing.
        """
        ...

    def finish(self) -> None:
        """Announce that the training is complete and saved: no other job has to join any more."""
        ...

    def close(self) -> None:
        """Leave the other jobs."""
        ...


@dataclass(frozen=True)
class Absent:
    """The `ReplicaGroups` of a job that averages with no other job.

    The check of a job before it starts also uses one, with the `count` of the planned jobs.
    """

    index: int = 0
    count: int = 1

    def require_alike(self, facts: Sequence[Fact]) -> None:
        pass

    def mean(
        self, w: Sequence[Tensor], t: int, *, alike: bool = True, contribution: Contribution | None = None
    ) -> None:
        raise AssertionError("nobody is there to average with")

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


NO_REPLICA_GROUPS: ReplicaGroups = Absent()
"""The `replica_groups` of a job that trains by itself."""
