"""A parameter server on all ranks: in every step a group sends its change and reads the parameters.

Q. Ho et al.: More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013: a
group that has sent c changes reads once every other group has sent c − s; s is the staleness.

Here a message is a whole request: the change and the answer. A request occupies only the link of the group
that sends it. The links of the hosts that answer are not counted, because all hosts do the same for each
other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcsgd.performance.simulation.compute import Seconds
from hpcsgd.performance.simulation.links import Indices
from hpcsgd.performance.simulation.simulated_run import SimulatedRun
from hpcsgd.performance.simulation.windows import in_windows


@dataclass(frozen=True)
class Ssp:
    """The rule of SSP: no group is more than `staleness` (s) steps ahead of the slowest group."""

    staleness: int
    dies_as_one = True

    def run(self, course: SimulatedRun) -> None:
        in_windows(course, _Clocks(self.staleness, course))


@dataclass(frozen=True)
class AsyncSgd:
    """The rule of asynchronous SGD: no group waits for others."""

    dies_as_one = True

    def run(self, course: SimulatedRun) -> None:
        in_windows(course, _Open())


class _Clocks:
    """The `Inbox` of SSP: how many groups have sent the change of each step, and when the last one did."""

    staleness = 0  # τ of `Inbox`, not s: a group waits for its own answer
    always = True

    def __init__(self, s: int, course: SimulatedRun) -> None:
        self._s, self._P, self._first, T = s, course.layout.P, course.first, course.T
        self._pushes, self._last = np.zeros(T, int), np.full(T, -np.inf)

    def sending(self, groups: Indices, steps: Indices) -> Indices:
        return np.arange(len(groups))

    def deliver(self, groups: Indices, steps: Indices, times: Seconds) -> None:
        self._pushes += np.bincount(steps, minlength=len(self._pushes))
        np.maximum.at(self._last, steps, times)

    def there(self, groups: Indices, steps: Indices) -> Seconds:
        needed = np.maximum(steps - self._s, self._first)
        all_pushed = np.where(self._pushes[needed] == self._P, self._last[needed], np.inf)
        return np.where(steps < self._first + self._s, -np.inf, all_pushed)


class _Open:
    staleness = 0
    always = True

    def sending(self, groups: Indices, steps: Indices) -> Indices:
        return np.arange(len(groups))

    def deliver(self, groups: Indices, steps: Indices, times: Seconds) -> None:
        """Do nothing, because no group waits for messages."""

    def there(self, groups: Indices, steps: Indices) -> Seconds:
        return np.full(len(groups), -np.inf)
