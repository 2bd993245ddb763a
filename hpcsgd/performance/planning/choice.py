"""Choose the estimate that a plan recommends, and state the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcsgd.errors import UserError, count_text
from hpcsgd.performance.planning.estimate import Estimate

WORTH = 0.5
"""The least efficiency, relative to one node, of a recommendation if the user sets no limits."""
GAIN = 0.05
"""The share of a step's time that another method must save to replace the job file's method."""


@dataclass(frozen=True)
class Limits:
    """The user's limits on the cost and duration of a run. A limit of None does not apply."""

    budget: float | None = None
    """Maximum node hours of the run."""
    deadline: float | None = None
    """Maximum hours of all epochs."""

    def __post_init__(self) -> None:
        for name in ("budget", "deadline"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"--{name} {value:g}: more than 0 is needed")

    def satisfied_by(self, e: Estimate) -> bool:
        in_budget = self.budget is None or e.node_hours <= self.budget
        return in_budget and (self.deadline is None or e.hours <= self.deadline)


def ranked(estimates: Sequence[Estimate], limits: Limits, own: str = "") -> tuple[list[Estimate], str]:
    """Return all estimates, the best one first, and the reason for choosing the best one.

    The best one is, in this order of preference:

    - with a deadline: the cheapest within it;
    - with a budget: the fastest within it;
    - otherwise: the fastest whose efficiency is at least `WORTH`.

    The job file's own method (`own`) replaces the best one if it is nearly as fast. Raises `UserError` if no
    estimate is within the limits.
    """
    fit = [e for e in estimates if limits.satisfied_by(e)]
    if not fit:
        raise UserError(_out_of_reach(estimates, limits))
    if limits.deadline is not None:
        best = min(fit, key=lambda e: (e.node_hours, e.hours))
        why = f"the fewest node hours of those that are done within {limits.deadline:g} h"
        why += "" if limits.budget is None else f" and {limits.budget:g} node hours"
    elif limits.budget is not None:
        best = min(fit, key=lambda e: (e.hours, e.node_hours))
        why = f"the fastest within {limits.budget:g} node hours"
    else:
        worth = [e for e in fit if e.efficiency >= WORTH]
        best = min(worth or fit, key=lambda e: (e.hours, e.node_hours))
        why = (
            f"the fastest whose ranks do {WORTH:.0%} or more of what they would do on one node"
            if worth
            else f"the fastest; nothing keeps {WORTH:.0%} of what ranks would do on one node"
        )
    best = _without_need_to_change(best, fit, own)
    rest = sorted(
        (e for e in estimates if e is not best), key=lambda e: (not limits.satisfied_by(e), e.hours)
    )
    return [best, *rest], f"{why}{_too_close(best, rest)}"


def _without_need_to_change(best: Estimate, fit: Sequence[Estimate], own: str) -> Estimate:
    """Return the job file's method on the same ranks and groups if it is nearly as fast, otherwise `best`."""
    most = best.step.seconds * (1 + GAIN)
    same = [e for e in fit if e.option.name == own and (e.N, e.P) == (best.N, best.P)]
    return min((e for e in same if e.step.seconds <= most), key=lambda e: e.hours, default=best)


def _too_close(best: Estimate, rest: Sequence[Estimate]) -> str:
    """Return a text that names methods in `rest`, on the same P × K, that may be as fast as `best`."""
    _, high = best.step.low, best.step.high
    near = [
        str(e.option)
        for e in rest
        if (e.N, e.P) == (best.N, best.P) and e.step.low <= high and best.step.low <= e.step.high
    ]
    return f"; within its errors so is {', '.join(near[:3])}" if near else ""


def _out_of_reach(estimates: Sequence[Estimate], limits: Limits) -> str:
    fastest = min(estimates, key=lambda e: e.hours)
    cheapest = min(estimates, key=lambda e: e.node_hours)
    given = [
        *([f"--deadline {limits.deadline:g} h"] if limits.deadline is not None else []),
        *([f"--budget {limits.budget:g} node hours"] if limits.budget is not None else []),
    ]
    return (
        f"{' and '.join(given)}: none of {len(estimates)} ways to run it; the fastest ({fastest.option} on "
        f"{count_text(fastest.N, 'rank')}) takes {fastest.hours:.3g} h, the cheapest ({cheapest.option} "
        f"on {count_text(cheapest.N, 'rank')}) {cheapest.node_hours:.3g} node hours"
    )
