"""A parameter server on all ranks: after every I-th step a group sends its change and reads the parameters.

Q. Ho et al.: More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013: a
group that has sent c changes reads once every other group has sent c − s; s is the staleness.

Here a message is a whole request: the change and the answer. A request occupies only the link of the group
that sends it. The links of the hosts that answer are not counted, because all hosts do the same for each
other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcsgd.core.waits import due
from hpcsgd.performance.simulation.compute import Seconds
from hpcsgd.performance.simulation.links import Indices
from hpcsgd.performance.simulation.simulated_run import SimulatedRun
from hpcsgd.performance.simulation.windows import in_windows


@dataclass(frozen=True)
class Ssp:
    """The rule of SSP: no group is more than `staleness` (s) changes ahead of the slowest group.

    Groups send a change after every `period` steps.
    """

    staleness: int
    period: int = 1
    dies_as_one = True

    def run(self, course: SimulatedRun) -> None:
        in_windows(course, _Clocks(self.staleness, self.period, course))


@dataclass(frozen=True)
class AsyncSgd:
    """The rule of asynchronous SGD and DiLoCo: no group waits for others.

    Groups send a change after every `period` steps.
    """

    period: int = 1
    dies_as_one = True

    def run(self, course: SimulatedRun) -> None:
        in_windows(course, _Open(self.period))


class _Clocks:
    """The `Inbox` of SSP: how many groups have sent the change of each step, and when the last one did."""

    staleness = 0  # τ of `Inbox`, not s: a group waits for its own answer

    def __init__(self, s: int, period: int, course: SimulatedRun) -> None:
        self._behind, self._period, self.always = s * period, period, period == 1
        self._P, self._first, T = course.layout.P, course.first, course.T
        self._pushes, self._last = np.zeros(T, int), np.full(T, -np.inf)

    def sending(self, groups: Indices, steps: Indices) -> Indices:
        return np.flatnonzero(due(steps + 1, self._period))

    def deliver(self, groups: Indices, steps: Indices, times: Seconds) -> None:
        self._pushes += np.bincount(steps, minlength=len(self._pushes))
        np.maximum.at(self._last, steps, times)

    def there(self, groups: Indices, steps: Indices) -> Seconds:
        needed = np.maximum(steps - self._behind, self._first)
        all_pushed = np.where(self._pushes[needed] == self._P, self._last[needed], np.inf)
        free = ~due(steps + 1, self._period) | (steps < self._first + self._behind)
        return np.where(free, -np.inf, all_pushed)


class _Open:
    """The `Inbox` of groups that wait for no other group."""

    staleness = 0

    def __init__(self, period: int) -> None:
        self._period, self.always = period, period == 1

    def sending(self, groups: Indices, steps: Indices) -> Indices:
        return np.flatnonzero(due(steps + 1, self._period))

    def deliver(self, groups: Indices, steps: Indices, times: Seconds) -> None:
        """Do nothing, because no group waits for messages."""

    def there(self, groups: Indices, steps: Indices) -> Seconds:
        return np.full(len(groups), -np.inf)
