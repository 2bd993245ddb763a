"""The schedules with a synchronization after every I-th step, and with none."""

from __future__ import annotations

from dataclasses import dataclass

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
class Never:
    """The schedule of methods whose groups never average their models."""

    traits = ScheduleTraits(known_before_update=True, rate=0.0)

    def __call__(self, s: StepContext) -> bool:
        return False


never = Never()
