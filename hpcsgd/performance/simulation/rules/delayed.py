"""Groups meet while they make the next d steps.

met = max over groups of ready + meeting     after update t, where groups meet; they go on at once
F ← max(ready, met) + gather                 after update t + d, else ready + gather

Where more than one meeting is under way they follow one after another, as on the one lane that they have.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from hpcsgd.core.waits import Period, due
from hpcsgd.performance.simulation.simulated_run import SimulatedRun


@dataclass(frozen=True)
class Delayed:
    """Meetings of all groups after every `period` steps arrive `steps` ≥ 1 later."""

    period: Period
    steps: int
    dies_as_one = True

    def run(self, course: SimulatedRun) -> None:
        d = course.durations
        F = np.full(course.layout.P, course.start)
        under_way: deque[tuple[int, float, float]] = deque()
        """The step in which each arrives, when all had come to it, and when it is over."""
        last = course.start
        for t in range(course.first, course.T):
            here = ready = F + course.work(t)
            if under_way and under_way[0][0] == t:
                _, first, over = under_way.popleft()
                here = np.maximum(ready, over)
                for_others = np.clip(first - ready, 0, None)
                course.stats.add("for other groups", t, for_others)
                course.stats.add("meetings", t, here - ready - for_others)
            if due(t + 1, self.period) and len(F) > 1:
                last = max(here.max(), last) + d.model_average
                under_way.append((t + self.steps, here.max(), last))
            F = here + d.gather
            course.made(t, slice(None), F)
        course.under_way = last if under_way else 0.0
