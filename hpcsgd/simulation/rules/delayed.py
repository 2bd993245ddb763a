"""Groups meet while they make the next d steps.

met = max over groups of ready + meeting     after update t, where the method inside meets; they go on at once
F ← max(ready, met) + gather                 after update t + d, else ready + gather
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcsgd.errors import UserError
from hpcsgd.simulation.course import Course, Rule
from hpcsgd.simulation.traffic import Scheduled


@dataclass(frozen=True)
class Delayed:
    """The meetings of `method`, all groups every so many steps, arrive `steps` later."""

    method: Rule
    steps: int
    dies_as_one = True

    def __post_init__(self) -> None:
        if not 0 <= self.steps <= self._every:
            raise UserError(f"steps = {self.steps}: expected 0 to {self._every}, those between meetings")

    @property
    def _every(self) -> int:
        every = self.method.traffic().every if isinstance(self.method, Scheduled) else None
        if every is None:
            raise UserError("delayed: expected a method of which all groups meet every so many steps")
        return every

    def messages(self, P: int) -> float:
        return 0.0

    def run(self, course: Course) -> None:
        d, every = course.durations, self._every
        F = np.zeros(course.layout.P)
        first = last = 0.0  # when all have come to the latest meeting, and when it is over
        for t in range(course.T):
            ready = F + course.work(t)
            begins = (t + 1) % every == 0 and len(F) > 1
            if begins and self.steps == 0:
                first, last = ready.max(), ready.max() + d.meeting
            here = ready
            begun = t + 1 - self.steps
            if begun > 0 and begun % every == 0 and len(F) > 1:
                here = np.maximum(ready, last)
                for_others = np.clip(first - ready, 0, None)
                course.ledger.add("for other groups", t, for_others)
                course.ledger.add("meetings", t, here - ready - for_others)
            if begins and self.steps:
                first, last = here.max(), here.max() + d.meeting
            F = here + d.gather
            course.made(t, slice(None), F)
