"""The outer schedule whose values follow straight lines between given points of the run."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from hpcsgd.arguments import checked
from hpcsgd.errors import UserError
from hpcsgd.parts.outer_schedules.base import OuterSchedule, OuterValues

LONGEST = 10**12
"""The largest number of steps of a run. Up to it a fraction of the run still tells one step from the next."""
Points = Sequence[Sequence[float]]
"""Pairs of a fraction of the run and the value there."""


@dataclass(frozen=True)
class Piecewise:
    """The schedule of straight lines between points. Two points with the same fraction are a jump."""

    total_steps: int
    lr: Points = ()
    momentum: Points = ()

    @property
    def knots(self) -> list[int]:
        inside = {round(x * self.total_steps) for x, _ in (*self.lr, *self.momentum)}
        return sorted({0, self.total_steps} | inside)

    def at(self, t: int, P: int) -> OuterValues:
        progress = t / self.total_steps
        return OuterValues(_value(self.lr, progress), _value(self.momentum, progress))


def _value(points: Points, progress: float) -> float | None:
    if not points:
        return None
    after = bisect_right([x for x, _ in points], progress)
    if after in (0, len(points)):
        return points[min(after, len(points) - 1)][1]
    (left, low), (right, high) = points[after - 1], points[after]
    return low + (high - low) * (progress - left) / (right - left)


@checked
def piecewise(
    total_steps: int, lr: Sequence[Sequence[float]] = (), momentum: Sequence[Sequence[float]] = ()
) -> OuterSchedule:
    """Return an outer schedule of straight lines between points of the run.

    A point is a pair of a fraction of the run and the value there. Before the first point and after the last
    one the value stays. Two points with the same fraction make a jump.

    Args:
        total_steps: Steps of the whole run, 1 to 10^12. A job file need not say it: the default there is the
            length of the run. After these steps the last values stay.
        lr: Points of the outer rate, such as ``[[0, 0.5], [0.2, 1]]``, each value ≥ 0. Default (): the outer
            optimizer's own rate.
        momentum: Points of the outer momentum, each value ≥ 0 and < 1. Default (): the outer optimizer's own
            momentum.

    Returns:
        An `OuterSchedule` for the argument `outer_schedule`, as of `diloco`.

    Raises:
        UserError: If there are no points, a point is not a pair, a fraction is outside the run or smaller
            than the one before, or a value is outside its bounds.

    Example:
        >>> schedule = hpcsgd.outer_schedules.piecewise(100, momentum=[[0.2, 0.5], [0.4, 0.9]])
        >>> round(schedule.at(30, P=4).momentum, 3)
        0.7

    See Also:
        `pier`: the stages of a paper.
    """
    require_total(total_steps)
    if not (lr or momentum):
        raise UserError(
            "piecewise: total_steps alone: expected points of lr, of momentum or of both", key="lr"
        )
    _require("lr", lr, math.inf)
    _require("momentum", momentum, 1.0)
    return Piecewise(total_steps, [tuple(point) for point in lr], [tuple(point) for point in momentum])


def require_total(total_steps: int) -> None:
    """Raise `UserError` unless `total_steps` is the length of a run."""
    if not 1 <= total_steps <= LONGEST:
        raise UserError(
            f"total_steps = {total_steps}: expected the number of steps of the whole run, 1 to 10^12",
            key="total_steps",
            value=total_steps,
        )


def _require(name: str, points: Points, below: float) -> None:
    def refuse(why: str) -> None:
        raise UserError(f"{name}: {why}", key=name, value=points)

    for point in points:
        if len(point) != 2:
            refuse(f"{list(point)}: expected pairs of a fraction of the run and a value")
        if not 0 <= point[0] <= 1:
            refuse(f"the fraction {point[0]:g} is outside the run: expected 0 to 1")
        if not 0 <= point[1] < below:
            refuse(
                f"the value {point[1]:g}: expected a number ≥ 0" + ("" if below == math.inf else " and < 1")
            )
    for (left, _), (right, _) in itertools.pairwise(points):
        if right < left:
            refuse(f"the fraction {right:g} comes after {left:g}: expected stages in order")
