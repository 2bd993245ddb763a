"""Judge whether a random run was right, from its ranks' files (witness.py) and the coordinator's event log.

A life is one process of a group, from its start to its end. A run is right if all of this is true:

- All ranks that used the result of a round hold the same bits: the mean of the groups that counted according
  to the log (faults_judge).
- A group's parameters before a synchronization are what plain SGD gives from those after the last one, with
  the samples that the group recorded.
- A group that resumed from a checkpoint began with a mean that had been committed at that step.
- No sample is counted twice in an epoch, over the rounds that remain valid (`useful.standing`).
- The last life of a group ended with exit code 0, and earlier ones by SIGKILL. They may end with 1 if the
  other groups had returned to a step before this life began, as its log then says. The last life of a group
  that was late for the end of the training counts as an earlier one.
- The saved model is finite and equal to the last mean.
"""

from __future__ import annotations

import math
import signal
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ensemble import faults_judge
from goodput.useful import of_groups, standing
from goodput.witness import CLASSES, features, read
from hpcsgd.elastic import event_log

EXACT = 1e-5
"""The tolerance for sums in a different order."""
GONE_BACK = "the other groups have gone back"
"""The message of a group that has to be restarted."""
LAST_WORDS = 3000
"""Characters of a log that an error quotes."""


@dataclass(frozen=True)
class Visit:
    """One synchronization of one rank."""

    t: int
    steps: list[list[int]]
    """The samples of each step since the last synchronization."""
    brought: Any
    """The parameters before it."""
    rounds: int
    """The round that it completed; 0 if the rank was killed before that."""
    took: Any
    """The parameters after it."""


def judge(
    folder: Path,
    store: Path,
    batch: int,
    rate: float,
    codes: Mapping[int, Sequence[int]],
    late: Collection[int],
    in_time: bool,
) -> dict[str, Any]:
    """Return the errors, the number of rounds, and the useful samples, as recorded and by the formula."""
    outcome = faults_judge.judge(folder, [], [] if in_time else ["not over in time"])
    events = event_log.read(folder / event_log.NAME)
    lives = {
        path.name.removeprefix("frames-"): visits(path, path.with_name(path.name.replace("frames", "steps")))
        for path in sorted(folder.glob("frames-*"))
    }
    wrong = [
        *outcome.wrong,
        *bad_codes(folder, codes, late),
        *not_replayed(lives, store, rate),
        *unknown_starts(lives, events),
    ]
    counted = seen(lives, events)
    for epoch, rows in sorted(by_epoch(events, counted).items()):
        if twice := [row for row, times in Counter(rows).items() if times > 1]:
            wrong.append(f"epoch {epoch}: samples {sorted(twice)} counted twice")
    wrong += bad_model(folder / "run" / "model.pt", lives, events)
    return {
        "wrong": wrong,
        "rounds": outcome.rounds,
        "samples": sum(map(len, counted.values())),
        "by_formula": of_groups(events, batch),
    }


def visits(frames: Path, steps: Path) -> list[Visit]:
    found: list[Visit] = []
    told = iter(read(steps))
    for _, rounds, _, _, vector in read(frames):
        if rounds:
            last = found.pop()
            found.append(Visit(last.t, last.steps, last.brought, rounds, vector))
        else:
            t, passes = next(told)
            found.append(Visit(t, passes, vector, 0, None))
    return found


def bad_codes(folder: Path, codes: Mapping[int, Sequence[int]], late: Collection[int]) -> list[str]:
    wrong = []
    for replica_group, lives in codes.items():
        for life, code in enumerate(lives, start=1):
            last = life == len(lives)
            goes_on = not last or replica_group in late
            killed = code == -signal.SIGKILL and goes_on
            log = folder / f"log-{replica_group}-{life}"
            said = log.read_text() if log.exists() else ""  # it may be killed before it has a log
            went_back = code == 1 and goes_on and GONE_BACK in said
            if not (killed or went_back or (last and code == 0)):
                wrong.append(f"life {life} of group {replica_group} ended with {code}: {said[-LAST_WORDS:]}")
    return wrong


def not_replayed(lives: Mapping[str, list[Visit]], store: Path, rate: float) -> list[str]:
    """Return an error for each synchronization whose parameters differ from a replay of all ranks' steps."""
    with h5py.File(store) as file:
        x, y = (torch.from_numpy(np.asarray(file[f"train/{name}"])) for name in "xy")
    wrong = []
    for first in (name for name in lives if name.endswith("-0")):
        ranks = [visits for name, visits in lives.items() if name.rpartition("-")[0] == first[:-2]]
        for before, *now in zip(ranks[0], *(visits[1:] for visits in ranks), strict=False):
            if before.rounds:
                steps = [list(chain(*rows)) for rows in zip(*(visit.steps for visit in now), strict=True)]
                if not np.allclose(
                    sgd(before.took, steps, x, y, rate), now[0].brought, atol=EXACT, rtol=EXACT
                ):
                    wrong.append(
                        f"life {first[:-2]}: what it brought after step {now[0].t} is not what it learned"
                    )
    return wrong


def sgd(start: Any, steps: Sequence[Sequence[int]], x: Tensor, y: Tensor, rate: float) -> Any:
    w = torch.from_numpy(start.copy()).view(CLASSES, -1)
    for rows in steps:
        w.requires_grad_()
        (g,) = torch.autograd.grad(cross_entropy(features(x[list(rows)]) @ w.T, y[list(rows)]), w)
        w = (w - rate * g).detach()
    return w.flatten().numpy()


def unknown_starts(lives: Mapping[str, list[Visit]], events: Sequence[event_log.Event]) -> list[str]:
    """Return an error for each life that resumed at a step from parameters that were never committed there.

    Only lives that counted in their first round are checked.
    """
    commits = {e["rounds"]: e for e in events if e["event"] == "commit"}
    means = {v.rounds: v.took.tobytes() for life in lives.values() for v in life if v.rounds}
    at: defaultdict[int, set[bytes]] = defaultdict(set)
    for rounds, mean in means.items():
        at[commits[rounds]["t"]].add(mean)
    wrong = []
    for name, life in lives.items():
        if life and life[0].rounds and life[0].t:
            counted = int(name.split("-")[0]) in commits[life[0].rounds]["counted"]
            if counted and life[0].brought.tobytes() not in at[life[0].t]:
                wrong.append(f"life {name}: it began at step {life[0].t} from nothing that all had")
    return wrong


def seen(lives: Mapping[str, list[Visit]], events: Sequence[event_log.Event]) -> dict[int, list[int]]:
    """Return, by valid round, the samples that count."""
    stands = {commit["rounds"]: commit["counted"] for commit, _ in standing(events)}
    rows: defaultdict[int, list[int]] = defaultdict(list)
    for name, life in lives.items():
        for visit in life:
            if int(name.split("-")[0]) in stands.get(visit.rounds, ()):
                rows[visit.rounds] += chain(*visit.steps)
    return rows


def by_epoch(events: Sequence[event_log.Event], rows: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Return the samples by epoch. The steps of a round that ends an epoch belong to that epoch."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for commit, _ in standing(events):
        found[math.ceil(commit["epoch"] + commit["fraction"]) - 1] += rows.get(commit["rounds"], [])
    return found


def bad_model(path: Path, lives: Mapping[str, list[Visit]], events: Sequence[event_log.Event]) -> list[str]:
    if not path.exists():
        return ["no model was saved"]
    (w,) = torch.load(path).values()
    means = {v.rounds: v.took for life in lives.values() for v in life if v.rounds}
    last = max(rounds for commit, _ in standing(events) if (rounds := commit["rounds"]) in means)
    if not torch.isfinite(w).all():
        return ["the model is not finite"]
    same = np.array_equal(w.flatten().numpy(), means[last])
    return [] if same else ["the model that was saved is not the last mean"]
