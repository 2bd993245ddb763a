"""The interface through which other code uses elastic groups: jobs that average with this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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

    def mean(self, w: Sequence[Tensor], t: int, *, alike: bool = True) -> None:
        """Replace `w`, after `t` updates, by its mean over the jobs that are present.

        `alike`: all ranks of this job hold the same `w`. Otherwise each rank holds its own rows of it.
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

    def mean(self, w: Sequence[Tensor], t: int, *, alike: bool = True) -> None:
        raise AssertionError("nobody is there to average with")

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


NO_REPLICA_GROUPS: ReplicaGroups = Absent()
"""The `replica_groups` of a job that trains by itself."""
