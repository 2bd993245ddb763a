"""Which samples were of use.

**Useful** are the samples that the model which is there at the end has learned from:

- of one job, or of DDP, those of the steps that it stands at. What was computed after the checkpoint to which
  a restart went back does not count; steps since the last checkpoint do, while the ranks that made them live.
- of groups, those of every committed round, of the groups whose models made its mean (`counted`). What an
  group did since its last meeting is lost where it dies; what it did while it was cut off, or looked on,
  does not count. Where all died, rounds after the checkpoint from which they went on do not.
- of torchft's replicas, those of every committed sync, of the replicas that took part and had not just been
  given the state of another.

**Possible** are the samples of an undisturbed run of the same contestant on this machine in the same time.

A batch counts as a whole, also the last one of an epoch, which may be shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Event = dict[str, Any]


def standing(events: Iterable[Event]) -> list[tuple[Event, int]]:
    """The commits whose work the model still holds, each with the steps that its groups had made since the
    one before."""
    kept: list[tuple[Event, int]] = []
    for event in events:
        if event["event"] != "commit":
            continue
        while kept and kept[-1][0]["t"] > event["t"]:
            kept.pop()  # all had died, and went on from before
        before = kept[-1][0]["t"] if kept else 0
        kept.append((event, event["t"] - before))
    return kept


def of_groups(events: Iterable[Event], batch: int) -> int:
    """Samples, by the event log of a run from its beginning."""
    return batch * sum(steps * len(commit["counted"]) for commit, steps in standing(events))


def of_one_job(lives: Sequence[Sequence[tuple[str, int]]], at_work: bool, batch: int) -> int:
    """Samples of all groups together, by what each life of the job told: ("begins", t), ("made", t),
    ("saved", t). `at_work`: the last one lives."""
    t = saved = 0
    for life in lives:
        t = saved
        for what, told in life:
            t = told
            if what == "saved":
                saved = told
    return batch * (t if at_work and lives else saved)


def of_replicas(told: Iterable[tuple[int, int]], batch: int, every: int) -> int:
    """Samples, by the syncs (step before, step after) of all: who was given the state of others jumps."""
    return batch * every * sum(after == before + 1 for before, after in told)
