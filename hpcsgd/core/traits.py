"""What others have to know of a schedule and of an exchange: one value of each, which the part itself gives.

Averagers have `hpcsgd.core.averager.Traits`. A part around another one takes the traits of that one, and
`dataclasses.replace` changes what is no longer so.
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

    The defaults are those of a schedule of which nothing is known.

    Raises:
        UserError: for a period or a spacing below 1, a rate that is no share, and for two that do not agree.
    """

    known_before_update: bool = False
    """The number of the step alone decides, so that the answer before the update is that after it."""
    period: int | None = None
    """Groups average after every so many updates, whatever happens; None: not at a fixed interval."""
    spacing: int | Fraction | None = None
    """Groups average for the n-th time after update ⌈n·`spacing`⌉, as evenly as whole steps can be; with a
    period that. None: nobody can tell beforehand after which updates."""
    rate: float | None = None
    """The share of steps after which groups average, 1/`spacing` where there is one; None: it depends on the
    training."""
    threshold: float | None = None
    """Groups average where something has changed by so much or more in any of them. By how much it has in
    its own group, the schedule notes as `delta` in every step."""

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
    """What the engine, the cost model and other methods have to know of an exchange.

    The defaults are those of an exchange of which no more is known than where it leaves the gradient.
    """

    shards: bool
    """True: `b.grad_shard` is the result, and each position updates its own chunk. False: `b.g` is."""
    across: bool = False
    """It brings the gradients of all groups together, and not only those of one."""
    per_bucket: bool = False
    """It is through with each bucket by itself, and not with the last one only, so that one is updated while
    the next is on its way."""
    keeps_gradients: bool = True
    """It keeps something of a step's gradients for later ones."""
