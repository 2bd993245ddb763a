"""Meetings at a fixed interval."""

from __future__ import annotations

from dataclasses import dataclass

from hpcsgd.core.step import StepContext
from hpcsgd.core.traits import ScheduleTraits
from hpcsgd.errors import UserError


@dataclass(frozen=True)
class Every:
    """After every I-th update (eq. 2 of the hierarchical local SGD paper: "after every I iterations")."""

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
    """Groups have nothing to meet for."""

    traits = ScheduleTraits(known_before_update=True, rate=0.0)

    def __call__(self, s: StepContext) -> bool:
        return False


never = Never()
