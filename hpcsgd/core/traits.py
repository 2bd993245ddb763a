"""The traits of schedules and of gradient reductions: what other code has to know of them.

The traits of averagers are `hpcsgd.core.averager.Traits`. A part around another part copies the traits of the
inner one, and changes what differs by `dataclasses.replace`.
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
    """True: only the step number decides, so the decision is already known before the update."""
    period: int | None = None
    """The fixed number of updates from one synchronization to the next. None: it is not fixed."""
    spacing: int | Fraction | None = None
    """The mean number of updates between synchronizations: the n-th one follows update ⌈n·`spacing`⌉. Equals
    `period` if `period` is set. None: these updates are not known in advance."""
    rate: float | None = None
    """The share of steps with a synchronization: 1/`spacing` if `spacing` is set. None: it depends on the
    training."""
    threshold: float | None = None
    """The groups average if some quantity has changed by at least `threshold` in any group. The schedule
    reports the change in its own group as the metric `delta` in every step."""

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

    leaves_shards: bool
    """True: the result for bucket b is `b.grad_shard`, and each rank updates its own shard. False: `b.g`."""
    across: bool = False
    """True: the gradient reduction averages the gradients of all groups, not only those of one."""
    per_bucket: bool = False
    """True: the gradient reduction finishes each bucket separately, so one bucket can be updated while the
    next is being reduced. False: it finishes all buckets with the last one."""
    keeps_gradients: bool = True
    """True: the gradient reduction keeps values made from a step's gradients for later steps, as error
    feedback does."""
