"""A parameter server on all ranks: every step a group pushes its change and reads what is kept.

Q. Ho et al.: More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013: who
has pushed c changes reads once every other has pushed c − s.

A message is here the whole question: the push, and the answer. What the link of a host does for the questions
of others is counted to their own links, of which all do the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcsgd.core.graphs import Complete
from hpcsgd.errors import UserError
from hpcsgd.simulation.compute import Seconds
from hpcsgd.simulation.course import Course
from hpcsgd.simulation.links import Indices
from hpcsgd.simulation.traffic import Traffic
from hpcsgd.simulation.windows import in_windows


@dataclass(frozen=True)
class Ssp:
    """None is more than `staleness` (s) steps ahead of the slowest."""

    staleness: int
    dies_as_one = True

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise UserError(
                f"staleness = {self.staleness}: a group may be 0 or more steps ahead of the slowest"
            )

    def messages(self, P: int) -> float:
        return 1.0

    def traffic(self) -> Traffic:
        return Traffic(graph=Complete(), lag=self.staleness)

    def run(self, course: Course) -> None:
        in_windows(course, _Clocks(self.staleness, course.layout.P, course.T))


@dataclass(frozen=True)
class AsyncSgd:
    """Nobody waits for others."""

    dies_as_one = True

    def messages(self, P: int) -> float:
        return 1.0

    def traffic(self) -> Traffic:
        return Traffic(graph=Complete())

    def run(self, course: Course) -> None:
        in_windows(course, _Open())


class _Clocks:
    """Who has pushed what."""

    staleness = 0  # of messages: a group waits for its own answer

    def __init__(self, s: int, P: int, T: int) -> None:
        self._s, self._P = s, P
        self._pushes, self._last = np.zeros(T, int), np.full(T, -np.inf)

    def deliver(self, groups: Indices, steps: Indices, times: Seconds) -> None:
        self._pushes += np.bincount(steps, minlength=len(self._pushes))
        np.maximum.at(self._last, steps, times)

    def there(self, groups: Indices, steps: Indices) -> Seconds:
        needed = np.maximum(steps - self._s, 0)
        all_pushed = np.where(self._pushes[needed] == self._P, self._last[needed], np.inf)
        return np.where(steps < self._s, -np.inf, all_pushed)


class _Open:
    staleness = 0

    def deliver(self, groups: Indices, steps: Indices, times: Seconds) -> None:
        """Nobody asks."""

    def there(self, groups: Indices, steps: Indices) -> Seconds:
        return np.full(len(groups), -np.inf)
