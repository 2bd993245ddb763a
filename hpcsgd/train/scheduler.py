"""The state of a learning-rate scheduler in a checkpoint, and the length of its schedule in a resumed run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hpcsgd import torch_private
from hpcsgd.config.schema import LrScheduleSection
from hpcsgd.errors import JobError, without_warnings
from hpcsgd.train.lr_schedule import scheduler_arguments
from hpcsgd.train.training_setup import TrainingSetup

log = logging.getLogger(__name__)

Tree = dict[str, Any]


def scheduler_state(scheduler: LRScheduler | None) -> Tree:
    return {} if scheduler is None else {"kind": type(scheduler).__name__, "state": scheduler.state_dict()}


def resume_schedule(
    parts: TrainingSetup, schedule: LrScheduleSection, epoch: int, shared: Tree, own: Tree | None
) -> int:
    """Continue the learning-rate schedule from a checkpoint; return the expected steps of the whole run.

    `epoch` is the number, from 0, of the epoch in which the run continues. `shared` is the state in the
    checkpoint that is the same for all ranks: it has the state of the scheduler and the length of the run.
    `own` is the state that this rank saved for itself; None if it cannot be used, for example because P × K
    has changed.
    """
    expected = _expected(parts, epoch, shared.get("length"), same_ranks=own is not None)
    arguments = scheduler_arguments(schedule, replace(parts.length, expected=expected))
    resume_scheduler(parts.scheduler, shared["scheduler"], arguments)
    return expected


def _expected(parts: TrainingSetup, epoch: int, saved: Mapping[str, int] | None, *, same_ranks: bool) -> int:
    """Return the number of steps of the whole run, to which the schedule is stretched.

    This is the number `saved` in the checkpoint, unless the length of the run or P × K has changed. A number
    that is computed anew would be smaller after steps without an update (overflows in float16), and would
    change the schedule.
    """
    asked = parts.length.expected
    saved = saved or {"asked": asked, "expected": asked}
    as_before = same_ranks and saved["asked"] == asked
    if (
        as_before or parts.optimizer.topology.is_elastic
    ):  # replica groups must have the same rates, whatever their ranks
        return saved["expected"]
    return parts.length.expected_from(epoch, parts.optimizer.t, parts.batches, parts.steps_per_epoch)


def resume_scheduler(scheduler: LRScheduler | None, saved: Tree, arguments: Mapping[str, Any]) -> None:
    """Continue the scheduler from its state `saved`, with this job's `arguments`.

    If arguments differ from the checkpoint's, the learning rates are from now on those of a schedule that had
    the new arguments from its start.
    """
    theirs, ours = saved.get("kind", "none"), scheduler_state(scheduler).get("kind", "none")
    if theirs != ours:
        raise JobError(
            f"[lr_schedule] name: {theirs} in the checkpoint, {ours} in this job: resume with that",
            key=("lr_schedule", "name"),
        )
    if scheduler is None:
        return
    state = saved["state"]
    scheduler.load_state_dict(state)
    fixed = {name: value for name, value in arguments.items() if name != "last_epoch"}  # a step count
    numbers = {name: value for name, value in fixed.items() if isinstance(value, int | float)}
    if changed := {name: value for name, value in numbers.items() if state.get(name, value) != value}:
        _hold_to(scheduler, changed)


def _hold_to(scheduler: LRScheduler, changed: Mapping[str, float]) -> None:
    reported = ", ".join(
        f"{name} {getattr(scheduler, name):g} → {value:g}" for name, value in changed.items()
    )
    rates = torch_private.closed_form_rates(scheduler)
    if rates is None:
        kind = type(scheduler).__name__
        log.warning("[lr_schedule] arguments: %s: %s keeps those that it began with", reported, kind)
        return
    vars(scheduler).update(changed)
    for group, lr in zip(scheduler.optimizer.param_groups, rates(), strict=True):
        group["lr"] = lr
    log.info("[lr_schedule] arguments: %s: rates are as if it had been so from the start", reported)


def fast_forward(scheduler: LRScheduler, times: int) -> None:
    """Go on `times` steps of the schedule, which other groups have made."""
    with without_warnings():  # torch warns of a missing `optimizer.step()`
        for _ in range(times):
            scheduler.step()
