"""All groups average their models after every I-th step, and wait for the result.

F is the time at which a group's last step ended:

ready = F + compute + grad_reduce + update
F ← max over groups of ready + average + gather    if t is a multiple of I, else ready + gather
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcsgd.core.waits import Period, due
from hpcsgd.performance.simulation.simulated_run import SimulatedRun


@dataclass(frozen=True)
class Synchronous:
    """The rule by which all groups average after every `period` steps and wait for each other."""

    period: Period
    dies_as_one = True

    def run(self, course: SimulatedRun) -> None:
        d = course.durations
        F = np.full(course.layout.P, course.start)
        for t in range(course.first, course.T):
            ready = F + course.work(t)
            if due(t + 1, self.period) and len(F) > 1:
                averaged = np.full_like(F, ready.max() + d.model_average)
                course.stats.add("for other groups", t, ready.max() - ready)
                course.stats.add("model_average", t, np.full_like(F, d.model_average))
            else:
                averaged = ready
            F = averaged + d.gather
            course.made(t, slice(None), F)
