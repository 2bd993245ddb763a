"""All groups average their models while they make the next d steps.

F is the time at which a group's last step ended, and ready = F + compute + grad_reduce + update:

synced = max over groups of ready + average  after a synchronization's update t; groups go on at once
F ← max(ready, synced) + gather              after update t + d, else ready + gather

Pending averages run one after another, because they share one communication thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from hpcsgd.core.waits import Period, due
from hpcsgd.performance.simulation.simulated_run import SimulatedRun


@dataclass(frozen=True)
class Delayed:
    """The rule of averages that begin after every `period` steps and are used `steps` ≥ 1 steps later."""

    period: Period
    steps: int
    dies_as_one = True

    def run(self, course: SimulatedRun) -> None:
        d = course.durations
        F = np.full(course.layout.P, course.start)
        under_way: deque[tuple[int, float, float]] = deque()
        """For each pending average: the step that uses it, when all groups were ready, and when it ends."""
        last = course.start
        for t in range(course.first, course.T):
            here = ready = F + course.work(t)
            if under_way and under_way[0][0] == t:
                _, first, over = under_way.popleft()
                here = np.maximum(ready, over)
                for_others = np.clip(first - ready, 0, None)
                course.stats.add("for other groups", t, for_others)
                course.stats.add("model_average", t, here - ready - for_others)
            if due(t + 1, self.period) and len(F) > 1:
                last = max(here.max(), last) + d.model_average
                under_way.append((t + self.steps, here.max(), last))
            F = here + d.gather
            course.made(t, slice(None), F)
        course.under_way = last if under_way else 0.0
