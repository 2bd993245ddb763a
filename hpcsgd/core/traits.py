"""The traits of schedules and gradient reductions: what other code has to know of each.

The traits of averagers are `hpcsgd.core.averager.Traits`. A part around another part copies its traits and
replaces what differs with `dataclasses.replace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from hpcsgd.arguments import checked
from hpcsgd.errors import UserError


@checked
@dataclass(frozen=True, slots=True)
class ScheduleTraits:
    """What the engine, the cost model and other methods have to know of a schedule.

    The defaults are the safe ones for an unknown schedule.

    Raises:
        UserError: If a period or spacing is below 1, a rate is not in 0 … 1, or two of them disagree.
    """

    known_before_update: bool = False
    """The step number alone decides, so the answer before the update equals that after it."""
    period: int | None = None
    """Updates from one synchronization to the next, always. None: the interval is not fixed."""
    spacing: int | Fraction | None = None
    """The n-th synchronization follows update ⌈n·`spacing`⌉, as evenly as whole steps allow. Equals `period`
    if that is set. None: the updates are not known in advance."""
    rate: float | None = None
    """The share of steps with a synchronization: 1/`spacing` if that is set. None: it depends on the
    training."""
    threshold: float | None = None
    """The groups average if some quantity has changed by at least this in any of them. The schedule reports
    the change in its own group as the metric `delta` in every step."""

    def __post_init__(self) -> None:
        what = "spacing" if self.period is None else "period"
        spacing = self.spacing if self.period is None else self.period
        if spacing is not None:
            if spacing < 1:
                raise UserError(f"{what} = {spacing}: groups average after at least 1 step")
            self._follow("spacing", spacing, f"{what} = {spacing}")
            self._follow("rate", float(1 / Fraction(spacing)), f"{what} = {spacing}")
        if self.rate is not None and not 0 <= self.rate <= 1:
            raise UserError(f"rate = {self.rate}: expected a share of the steps, 0 to 1")

    def _follow(self, name: str, value: float | Fraction, given: str) -> None:
        if getattr(self, name) not in (None, value):
            raise UserError(f"{name} = {getattr(self, name)} with {given}: leave the {name} out")
        object.__setattr__(self, name, value)


@checked
@dataclass(frozen=True, slots=True)
class GradReduceTraits:
    """What the engine, the cost model and other methods have to know of a gradient reduction.

    The defaults are the safe ones for an unknown gradient reduction.
    """

    shards: bool
    """True: the result is `b.grad_shard`, and each rank updates its own shard. False: it is `b.g`."""
    across: bool = False
    """It averages the gradients of all groups, not only those of one."""
    per_bucket: bool = False
    """It finishes each bucket separately, not all at the last one. One bucket can then be updated while the
    next is being reduced."""
    keeps_gradients: bool = True
    """It keeps something of a step's gradients for later steps."""
