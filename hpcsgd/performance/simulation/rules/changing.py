"""One rule first, and another one from the step on in whose place all groups have met."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcsgd.performance.simulation.simulated_run import Rule, SimulatedRun


@dataclass(frozen=True)
class Changing:
    """`first` up to and with step `at`, counted from 1; at its end all groups meet, and `then` goes on."""

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
        """Return when all have become one model, which what is under way comes before."""
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
