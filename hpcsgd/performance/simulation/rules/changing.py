"""A change from one rule to another at the end of a given step, when all groups average their models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcsgd.performance.simulation.simulated_run import Rule, SimulatedRun


@dataclass(frozen=True)
class Changing:
    """The rule of a method that changes: `first` for steps 1 to `at`, an average of all groups, `then`."""

    first: Rule
    then: Rule
    at: int
    dies_as_one = True

    def run(self, course: SimulatedRun) -> None:
        if self.at == 0:
            self.then.run(course)
            return
        change = self.at if course.first < self.at <= course.T else course.T
        part = course.part(course.first, change, course.start)
        self.first.run(part)
        if change == self.at:
            part = course.part(change, course.T, self._synchronize(part))
            self.then.run(part)
        course.under_way = part.under_way

    def _synchronize(self, course: SimulatedRun) -> float:
        """Average all groups once pending averages are done, and return the time when the average ends."""
        t, F = course.T - 1, course.ended.copy()
        if len(F) == 1:
            return float(F[0])
        begin = max(F.max(), course.under_way)
        averaged = np.full_like(F, begin + course.durations.model_average)
        course.stats.add("for other groups", t, F.max() - F)
        course.stats.add("model_average", t, averaged - F.max())
        course.stats.forget(t)
        course.stats.finished(t, averaged)
        course.ended[:] = averaged
        return float(averaged[0])
