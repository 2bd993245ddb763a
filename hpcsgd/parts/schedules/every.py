"""The schedules of synchronizations at a fixed interval, and of none.

After every I-th step groups synchronize the model, or one after the other its fragments.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from hpcsgd.core.step import StepContext
from hpcsgd.core.traits import ScheduleTraits
from hpcsgd.errors import UserError


@dataclass(frozen=True)
class Every:
    """The schedule that synchronizes after every I-th update (hierarchical local SGD paper, eq. 2).

    The paper says "after every I iterations".
    """

    I: int  # noqa: E741 - the papers' letter

    def __post_init__(self) -> None:
        if self.I < 1:
            raise UserError(
                f"sync_every = {self.I}: groups average after at least 1 step", key="sync_every", value=self.I
            )

    @property
    def traits(self) -> ScheduleTraits:
        return ScheduleTraits(known_before_update=True, period=self.I)

    def __call__(self, s: StepContext) -> bool:
        return s.t % self.I == 0


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


@dataclass(frozen=True)
class Never:
    """The schedule of methods whose groups never average their models."""

    traits = ScheduleTraits(known_before_update=True, rate=0.0)

    def __call__(self, s: StepContext) -> bool:
        return False


never = Never()
