"""Count the useful samples of a run.

**Useful** samples are those from which the final model has learned:

- One job, or DDP: the samples of all steps that the final model contains. Steps after the checkpoint to which
  a restart returned do not count. Steps since the last checkpoint count while the ranks that made them live.
- Groups: for each committed round, the samples of the groups whose models were in its mean (`counted`). If a
  group dies, its steps since its last synchronization are lost. Steps that it made while it was disconnected
  or did not count are not useful. If all groups died, rounds after the checkpoint from which they resumed do
  not count.
- torchft's replicas: for each committed synchronization, the samples of the replicas that took part and had
  not just received the state of another replica.

**Possible** samples are those of an undisturbed run of the same contestant on this machine in the same time.

Each batch counts in full, even the last one of an epoch, which may be shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Event = dict[str, Any]


def standing(events: Iterable[Event]) -> list[tuple[Event, int]]:
    """Return the commits whose work the model still contains.

    Each comes with the number of steps since the previous one.
    """
    kept: list[tuple[Event, int]] = []
    for event in events:
        if event["event"] != "commit":
            continue
        while kept and kept[-1][0]["t"] > event["t"]:
            kept.pop()  # all groups had died and resumed from an earlier step
        before = kept[-1][0]["t"] if kept else 0
        kept.append((event, event["t"] - before))
    return kept


def of_groups(events: Iterable[Event], batch: int) -> int:
    """Return the useful samples of groups, from the event log of a whole run."""
    return batch * sum(steps * len(commit["counted"]) for commit, steps in standing(events))


def of_one_job(lives: Sequence[Sequence[tuple[str, int]]], at_work: bool, batch: int) -> int:
    """Return the useful samples of one job, from the records of each start of the job.

    A record is ("begins", t), ("made", t) or ("saved", t). `at_work`: the last start is still alive. `batch`:
    samples per step of all groups together.
    """
    t = saved = 0
    for life in lives:
        t = saved
        for what, told in life:
            t = told
            if what == "saved":
                saved = told
    return batch * (t if at_work and lives else saved)


def of_replicas(told: Iterable[tuple[int, int]], batch: int, every: int) -> int:
    """Return the useful samples of torchft's replicas, from all pairs (step before, step after) of syncs.

    A replica that received the state of another one has a larger difference than 1.
    """
    return batch * every * sum(after == before + 1 for before, after in told)
