"""The schedule by which the fragments of a model synchronize one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from hpcsgd.core.step import StepContext
from hpcsgd.core.traits import ScheduleTraits


@dataclass(frozen=True)
class InTurn:
    """The schedule that says which fragment begins its synchronization after which update.

    Each of F fragments synchronizes every I updates. Fragment p begins after update t if t + ⌊p·I/F⌋ is a
    multiple of I.
    """

    I: int  # noqa: E741 - the papers' letter
    F: int

    @property
    def offsets(self) -> list[int]:
        return [p * self.I // self.F for p in range(self.F)]

    @property
    def traits(self) -> ScheduleTraits:
        return ScheduleTraits(known_before_update=True, spacing=Fraction(self.I, self.F))

    def at(self, t: int) -> list[int]:
        """Return the indices of the fragments that begin a synchronization after update t."""
        return [p for p, offset in enumerate(self.offsets) if (t + offset) % self.I == 0]

    def __call__(self, s: StepContext) -> bool:
        return bool(self.at(s.t))
