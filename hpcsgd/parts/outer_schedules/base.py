"""Outer schedules: the rate and the momentum of an outer optimizer over the run."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import optim

from hpcsgd.errors import UserError

log = logging.getLogger(__name__)

FEW = 20
"""A stage with fewer synchronizations is too short for an outer momentum of 0.9 and more to settle."""


class OuterValues(NamedTuple):
    """The rate and the momentum of one outer step; None leaves the outer optimizer's own value."""

    lr: float | None = None
    momentum: float | None = None


@runtime_checkable
class OuterSchedule(Protocol):
    """The rate and the momentum of an outer optimizer, as a function of the step and the number of groups.

    The function has no state, so a checkpoint keeps nothing of it.
    """

    @property
    def knots(self) -> Sequence[int]:
        """The steps at which a stage begins or ends, in order; empty if the values never change."""
        ...

    def at(self, t: int, P: int) -> OuterValues:
        """Return the values of a synchronization that begins after step t, between P groups."""
        ...


def set_outer_values(optimizer: optim.Optimizer, values: OuterValues) -> None:
    """Set the rate and the momentum of `optimizer`; an Adam's momentum is the first of its `betas`.

    Raises `UserError` if `optimizer` has no momentum to set.
    """
    for group in optimizer.param_groups:
        if values.lr is not None:
            group["lr"] = values.lr
        if values.momentum is None:
            continue
        if "momentum" in group:
            group["momentum"] = values.momentum
        elif "betas" in group:
            group["betas"] = (values.momentum, *group["betas"][1:])
        else:
            raise UserError(
                f"outer_schedule: {type(optimizer).__name__} has no momentum to set: leave momentum out of "
                "the schedule, or take an outer optimizer with momentum or betas",
                key="outer_schedule",
            )


def require_useful(schedule: OuterSchedule, sync_every: int, begin: int = 0, num_fragments: int = 1) -> None:
    """Check `schedule` for groups that synchronize every `sync_every` steps after step `begin`.

    They synchronize each of `num_fragments` fragments so often, one after the other. Warns if a stage, or the
    part up to step `begin`, has fewer than `FEW` synchronizations of each. Raises `UserError` if the rate is
    0 at the first one of any, because groups would lose what they have learned.
    """
    steps = -(-sync_every // num_fragments)
    require_rate(schedule, (begin // steps + 1) * steps)
    bounds = sorted({0, *(max(knot, begin) for knot in schedule.knots)})
    counts = [stop // sync_every - start // sync_every for start, stop in itertools.pairwise(bounds)]
    if counts and min(counts) < FEW:
        start, stop = list(itertools.pairwise(bounds))[counts.index(min(counts))]
        log.warning(
            "outer_schedule: too few synchronizations in the stage from step %d to %d: %d, advised are %d; "
            "take a shorter sync_every, or a momentum of 0.9 at most",
            start, stop, min(counts), FEW,
        )  # fmt: skip


def require_rate(schedule: object, first: int) -> None:
    """Raise `UserError` if `schedule` is an outer schedule with a rate of 0 after step `first`.

    That is the first step after which groups synchronize.
    """
    if isinstance(schedule, OuterSchedule) and schedule.at(first, 2).lr == 0:
        raise UserError(
            f"outer_schedule: its rate is 0 at step {first}, where groups synchronize: they would lose what "
            "they have learned; let the schedule begin earlier",
            key="outer_schedule",
        )
