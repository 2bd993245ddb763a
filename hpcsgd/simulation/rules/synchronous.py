"""All groups meet: in every step, or in every I-th.

ready = F + compute + exchange + update
F ← max over groups of ready + meeting + gather    where t is a multiple of I, else ready + gather
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcsgd.errors import UserError
from hpcsgd.simulation.course import Course
from hpcsgd.simulation.traffic import Traffic


@dataclass(frozen=True)
class Hierarchical:
    """Every `every` steps. With 1 it is `bsp`."""

    every: int
    dies_as_one = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"every = {self.every}: groups meet after at least 1 step")

    def messages(self, P: int) -> float:
        return 0.0

    def traffic(self) -> Traffic:
        return Traffic(every=self.every)

    def run(self, course: Course) -> None:
        d = course.durations
        F = np.zeros(course.layout.P)
        for t in range(course.T):
            ready = F + course.work(t)
            if (t + 1) % self.every == 0 and len(F) > 1:
                met = np.full_like(F, ready.max() + d.meeting)
                course.ledger.add("for other groups", t, ready.max() - ready)
                course.ledger.add("meetings", t, np.full_like(F, d.meeting))
            else:
                met = ready
            F = met + d.gather
            course.made(t, slice(None), F)


def bsp() -> Hierarchical:
    """All groups in every step. Before the update or after it is the same time."""
    return Hierarchical(every=1)
