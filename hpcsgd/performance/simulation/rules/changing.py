"""One rule up to a step at whose end all groups average, and another rule after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcsgd.performance.simulation.simulated_run import Rule, SimulatedRun


@dataclass(frozen=True)
class Changing:
    """`first` up to and including step `at`, counted from 1, then an average of all groups, then `then`."""

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
        """Average all groups once pending results have arrived, and return when that is done."""
        t, F = course.T - 1, course.ended.copy()
        if len(F) == 1:
            return float(F[0])
        begin = max(F.max(), course.under_way)
        met = np.full_like(F, begin + course.durations.model_average)
        course.stats.add("for other groups", t, F.max() - F)
        course.stats.add("meetings", t, met - F.max())
        course.stats.forget(t)
        course.stats.finished(t, met)
        course.ended[:] = met
        return float(met[0])
