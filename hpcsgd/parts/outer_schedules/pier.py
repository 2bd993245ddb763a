"""Pier's outer schedules: a momentum that falls from 0.99 to 0.9, and a rate with a warm-up.

S. Fan, Z. Zhang: Pier: Efficient Large Language Model pretraining with Relaxed Global Communication, 2025
(arXiv:2511.17849). We read its authors' code, not the paper. b is the end of the lazy start, a fraction of
the run, 0.1 there. In the first version of the code

    momentum   0.99 until b + 0.05, 0.95 until b + 0.1, then 0.9
    rate       0 at b, rises in a straight line to 1.1 at b + 0.1, falls to 0.9 at 0.8

and in that of 2026 both fall along half a cosine wave:

    momentum   0.99 at b, 0.9 at the end
    rate       0 at b, rises in a straight line to 1.1 at b + 0.1, 0.9 at the end

Differences from the code: its first version counts some of these points in steps, and not all from the same
step, so that a rate may be negative. Here all are fractions of the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcsgd.arguments import checked
from hpcsgd.errors import UserError
from hpcsgd.parts.outer_schedules.base import OuterSchedule, OuterValues
from hpcsgd.parts.outer_schedules.piecewise import Piecewise, require_total

WARM_UP = 0.1
"""The part of the run in which the rate rises."""
LAST_STAGE = 0.8
"""The fraction of the run at which the rate falls to its last value."""
HIGHEST_LR, LAST_LR = 1.1, 0.9
HIGHEST_MOMENTUM, LAST_MOMENTUM = 0.99, 0.9


@dataclass(frozen=True)
class PierCosine:
    """The schedule of the code of 2026, for a lazy start that ends at the fraction `begin` of the run."""

    total_steps: int
    begin: float

    @property
    def knots(self) -> list[int]:
        fractions = (0.0, self.begin, self.begin + WARM_UP, 1.0)
        return sorted({round(x * self.total_steps) for x in fractions})

    def at(self, t: int, P: int) -> OuterValues:
        progress, warm = t / self.total_steps, self.begin + WARM_UP
        lr = _half_cosine(HIGHEST_LR, LAST_LR, (progress - warm) / (1 - warm))
        if progress < warm:
            lr = HIGHEST_LR * max(progress - self.begin, 0.0) / WARM_UP
        momentum = (progress - self.begin) / (1 - self.begin)
        return OuterValues(lr, _half_cosine(HIGHEST_MOMENTUM, LAST_MOMENTUM, momentum))


def _half_cosine(first: float, last: float, x: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * min(max(x, 0.0), 1.0))) / 2


@checked
def pier(total_steps: int, begin: float = 0.0) -> OuterSchedule:
    """Return Pier's outer schedule: momentum 0.99, 0.95 and 0.9, and a rate that rises to 1.1.

    The method `pier` uses it. With another method `begin` is 0, unless the groups first train without
    synchronizations.

    Args:
        total_steps: Steps of the whole run, 1 to 10^12. A job file need not say it: the default there is the
            length of the run. After these steps the last values stay.
        begin: Fraction of the run at which the rate begins to rise from 0, ≥ 0 and ≤ 0.7. Default 0.0.

    Returns:
        An `OuterSchedule` for the argument `outer_schedule`, as of `diloco`.

    Raises:
        UserError: If an argument is outside these bounds.

    Example:
        >>> schedule = hpcsgd.outer_schedules.pier(1000, begin=0.1)
        >>> [round(schedule.at(t, P=4).lr, 3) for t in (150, 200, 900)]
        [0.55, 1.1, 0.9]

    References:
        S. Fan, Z. Zhang: Pier: Efficient Large Language Model pretraining with Relaxed Global Communication,
        2025 (arXiv:2511.17849).

    See Also:
        `pier_cosine`: the schedule in the newer code of its authors.
    """
    _require(total_steps, begin)
    half, warm = round(begin + WARM_UP / 2, 9), round(begin + WARM_UP, 9)  # 0.1 + 0.05 is more than 0.15
    lr = [(begin, 0.0), (warm, HIGHEST_LR), (LAST_STAGE, HIGHEST_LR), (LAST_STAGE, LAST_LR)]
    momentum = [(half, HIGHEST_MOMENTUM), (half, 0.95), (warm, 0.95), (warm, LAST_MOMENTUM)]
    return Piecewise(total_steps, lr, momentum)


@checked
def pier_cosine(total_steps: int, begin: float = 0.0) -> OuterSchedule:
    """Return the outer schedule of Pier's newer code: momentum and rate fall along half a cosine wave.

    Args:
        total_steps: Steps of the whole run, 1 to 10^12. A job file need not say it: the default there is the
            length of the run. After these steps the last values stay.
        begin: Fraction of the run at which the rate begins to rise from 0, ≥ 0 and ≤ 0.7. Default 0.0.

    Returns:
        An `OuterSchedule` for the argument `outer_schedule`, as of `diloco`.

    Raises:
        UserError: If an argument is outside these bounds.

    Example:
        >>> schedule = hpcsgd.outer_schedules.pier_cosine(1000, begin=0.1)
        >>> [round(schedule.at(t, P=4).lr, 3) for t in (150, 600, 1000)]
        [0.55, 1.0, 0.9]

    References:
        S. Fan, Z. Zhang: Pier: Efficient Large Language Model pretraining with Relaxed Global Communication,
        2025 (arXiv:2511.17849), in the code of its authors.

    See Also:
        `pier`: the stages of the older code.
    """
    _require(total_steps, begin)
    return PierCosine(total_steps, begin)


def _require(total_steps: int, begin: float) -> None:
    require_total(total_steps)
    if not 0 <= begin <= 0.7:
        raise UserError(
            f"begin = {begin:g}: expected a fraction of the run from 0 to 0.7, so that the rate has risen "
            "before its last stage",
            key="begin",
            value=begin,
        )
