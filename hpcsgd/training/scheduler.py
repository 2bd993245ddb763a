"""The state of a torch scheduler, or of none, in a checkpoint."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hpcsgd.errors import JobError

Tree = dict[str, Any]


def scheduler_state(scheduler: LRScheduler | None) -> Tree:
    return {} if scheduler is None else {"kind": type(scheduler).__name__, "state": scheduler.state_dict()}


def take_up_scheduler(scheduler: LRScheduler | None, saved: Tree) -> None:
    theirs, ours = saved.get("kind", "none"), scheduler_state(scheduler).get("kind", "none")
    if theirs != ours:
        raise JobError(f"[schedule] build: {theirs} in the checkpoint, {ours} in this job: resume with that")
    if scheduler is not None:
        scheduler.load_state_dict(saved["state"])
