"""Repeat the paper's figure 5, scaled down: one of two groups is slow for ten epochs, the other dies once.

As in the paper, the coordinator assigns the samples per pass to the groups. A pass takes the same time for
any number of samples, as on an accelerator that is not full. Here a pass sleeps. A batch has B samples, so a
group with x samples per pass needs B/x passes for a step, and t_i = α_i/x_i.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor, nn

from harness import Goal, print_table, programs
from harness.launching import python_path
from hpcsgd.elastic import event_log
from hpcsgd.elastic.join_info import join_info
from hpcsgd.elastic.rebalancing import shares

B, X = 120, 16
EPOCHS, QUICK = 60, 34
SLOW_FROM, SLOW_TO, DEAD_AT = 5, 15, 26
PASS = 0.004
"""Seconds that a pass takes."""
SLOWER = 0.008
"""Additional seconds of a pass in the slow group."""

JOB = f"""
[data]
path = "{{store}}"
group_batch_size = {B}
[model]
name = "ensemble.reallocation:build"
arguments = {{{{ folder = "{{folder}}" }}}}
[optimizer]
lr = 0.05
[lr_schedule]
scaling = "linear"
[method]
name = "ensemble_sync"
sync_every = 100
[training]
epochs = {{epochs}}
eval_every_epochs = {{epochs}}
log_every = 1000
[rebalance]
resource = "samples"
total = {X}
[run]
output_dir = "{{folder}}"
"""


class Passes(nn.Module):
    """A layer that sleeps as long as its group would compute; group 0 kills itself once, in epoch DEAD_AT."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        invited = join_info()
        assert invited is not None
        self._group, self._folder = invited.replica_group, folder
        self._looked, self._epoch = 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            slow = self._group == 1 and SLOW_FROM <= self._now() < SLOW_TO
            time.sleep(PASS + (SLOWER if slow else 0))
            died = self._folder / "died"
            if self._group == 0 and self._now() >= DEAD_AT and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return x

    def _now(self) -> int:
        """Return the epoch from the coordinator's register."""
        if time.monotonic() - self._looked > 0.05:
            self._epoch = json.loads((self._folder / "register.json").read_text())["place"]["epoch"]
            self._looked = time.monotonic()
        return self._epoch


def build(folder: str) -> nn.Module:
    """Return the model of the job file."""
    return nn.Sequential(Passes(Path(folder)), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@dataclass(frozen=True)
class Epoch:
    """An epoch: the samples per pass of each group, its duration, and what Lemma 1 predicts for both."""

    number: int
    units: dict[int, int]
    seconds: float
    ideal_units: dict[int, int]
    ideal_seconds: float


def run(folder: Path, store: Path, epochs: int) -> list[Epoch]:
    """Run the whole scenario with `hpcsgd launch`; return the epochs that `settled` selects."""
    folder.mkdir(parents=True)
    job = folder.parent / "reallocation.toml"
    job.write_text(JOB.format(store=store.resolve(), folder=folder.resolve(), epochs=epochs))
    programs.run(
        [sys.executable, "-m", "hpcsgd", "launch", str(job), "--groups", "2", "--resume"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}, timeout=3600,
    )  # fmt: skip
    return settled(event_log.read(folder / "events.jsonl"))


def settled(events: list[event_log.Event]) -> list[Epoch]:
    """Return the epochs that began and ended with the same groups."""
    ends = [event for event in events if event["event"] == "commit" and not event["fraction"]]
    given = [event for event in events if event["event"] == "units"]
    seconds = {end["epoch"]: (begin, end) for begin, end in pairwise(ends)}
    usual = median(e["at"] - b["at"] for b, e in seconds.values() if b["epoch"] in range(1, SLOW_FROM))
    found = []
    for begin, end in seconds.values():
        number = begin["epoch"]
        units = max((g for g in given if g["at"] <= begin["at"] + 0.1), key=lambda g: g["at"])["units"]
        if set(begin["members"]) != set(end["members"]) or set(units) != set(end["members"]):
            continue
        alpha = _alpha(number, usual, len(units))
        found.append(
            Epoch(
                number, units, end["at"] - begin["at"],
                shares({i: alpha[i] for i in units}, X), sum(alpha[i] for i in units) / X,
            )
        )  # fmt: skip
    return found


def _alpha(epoch: int, usual: float, replica_groups: int) -> dict[int, float]:
    """Return α_i in seconds · samples.

    It comes from an undisturbed epoch of two groups with X/2 samples each, plus the additional time of the
    slow group's passes. A group that is alone makes twice as many steps.
    """
    alone = 2 / replica_groups
    plain = usual * X / 2 * alone
    passes = usual / (PASS + _overhead(usual))
    slow = SLOWER * passes * X / 2 * alone if SLOW_FROM <= epoch < SLOW_TO else 0.0
    return {0: plain, 1: plain + slow}


def _overhead(usual: float) -> float:
    """Return the seconds of a pass in addition to its sleep."""
    steps = 1437 // (2 * B) + 1
    return max(usual / (steps * B / (X / 2)) - PASS, 0.0)


def reallocation(data: Path, *, quick: bool) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Run and judge the scenario; return its rows and goals."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        rows, goals = judge(run(folder, data / "digits.h5", QUICK if quick else EPOCHS))
    head = ["epoch", "units", "Lemma 1", "seconds", "t*"]
    table = [
        (row["epoch"], row["units"], row["lemma_1"], f"{row['seconds']:.2f}", f"{row['ideal_seconds']:.2f}")
        for row in rows
    ]
    print_table(table, head)
    return rows, goals


def judge(found: list[Epoch]) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Return rows and goals. The goals exclude epoch 0 and those in which a group's speed changed."""
    changes = {SLOW_FROM, SLOW_TO}
    after = [e for e in found if e.number > 0 and e.number not in changes]
    units = max(max(abs(e.units[i] - e.ideal_units[i]) for i in e.units) for e in after)
    off = [e.seconds / e.ideal_seconds - 1 for e in after]
    rows = [
        {"epoch": e.number, "units": e.units, "seconds": e.seconds, "lemma_1": e.ideal_units,
         "ideal_seconds": e.ideal_seconds}
        for e in found
    ]  # fmt: skip
    goals = [
        Goal("units from Lemma 1, at most", units, 1),
        Goal("epoch beyond t*, median of settled epochs", median(off), 0.15),
        Goal("epoch beyond t*, nine in ten of settled epochs", sorted(off)[int(0.9 * len(off))], 0.15),
    ]
    return rows, goals
