"""The learning rate of a job file over time: scaling with the groups, warm-up, and a torch scheduler."""

from __future__ import annotations

import logging
from typing import Any

from torch import optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hpcsgd.config.schema import LrScheduleSection
from hpcsgd.engine.lr import WarmUp, first_factor
from hpcsgd.errors import UserError
from hpcsgd.named import build
from hpcsgd.train.length import Length
from hpcsgd.train.parts import SCHEDULERS

LENGTH = "length"

log = logging.getLogger(__name__)


def make_warm_up(
    schedule: LrScheduleSection, optimizer: optim.Optimizer, P: int, steps_per_epoch: int
) -> WarmUp:
    """Return the warm-up of `schedule` for P groups.

    If the learning rate is scaled with P, the warm-up begins at the rate of one group. With a single group
    the rate stays the same, and the log says so.
    """
    steps = round(schedule.warmup_epochs * steps_per_epoch)
    start = first_factor(schedule.scaling, P, steps)
    if steps and start == 1 and schedule.scaling != "none":
        log.info(
            "lr_schedule: warmup_epochs has no effect: scaling = %s climbs from the rate of one group, and "
            "there is one group",
            schedule.scaling,
        )
    return WarmUp(optimizer, steps, start)


def make_scheduler(
    schedule: LrScheduleSection, optimizer: optim.Optimizer, how_long: Length
) -> LRScheduler | None:
    if schedule.name is None:
        return None
    given = scheduler_arguments(schedule, how_long)
    made = build("lr_schedule", schedule.name, SCHEDULERS, given, LRScheduler, optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise UserError(
            "[lr_schedule] name: ReduceLROnPlateau goes by results; allowed are schedulers that go by "
            "the number of steps or epochs alone",
            key=("lr_schedule", "name"),
        )
    return made


def scheduler_arguments(schedule: LrScheduleSection, how_long: Length) -> dict[str, Any]:
    """Return the scheduler's arguments. "length" becomes the length of the run in steps or epochs."""
    whole = how_long.expected if schedule.interval == "step" else how_long.epochs
    return {name: whole if value == LENGTH else value for name, value in schedule.arguments.items()}
