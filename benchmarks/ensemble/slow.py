"""`ensemble.py --slow`: what does a quorum save where one of four groups is four times slower?

Four groups of one rank train a small network on handwritten digits, with DiLoCo's outer optimizer. In the
first run every synchronization waits for all groups; in the second it waits for three, and `GRACE` seconds
more. Computing is a sleep of the same length in each pass, which the slow group makes four times longer.
The second run has more epochs, because it loses what the slow group learns.

The target is the test loss of the first run at its end. Time counts from the first synchronization, and the
loss between two epochs is linear in it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from harness import Goal, Spread, print_table, programs
from harness.curve import reached
from harness.launching import python_path
from hpcsgd.elastic import event_log
from hpcsgd.elastic.join_info import join_info
from hpcsgd.report import records

GROUPS, SLOW, TIMES = 4, 3, 4
"""The number of groups, the index of the slow one, and how many times slower it is."""
PASS = 0.02
"""Seconds that a group computes for a step."""
GRACE = 0.25
EPOCHS, LONGER = 12, 1.5
"""Epochs of the run that waits for all, and how many times as many the other one has."""
ALL, QUORUM = "waits for all", "quorum of 3"
RATIO = 0.45
Row = dict[str, Any]

JOB = """
seed = {seed}
[data]
path = "{store}"
group_batch_size = 8
[model]
name = "ensemble.slow:build"
[optimizer]
lr = 0.05
[method]
name = "ensemble_sync"
sync_every = 15
outer = {{ name = "SGD", lr = 0.7, momentum = 0.8, nesterov = true }}
{quorum}
[training]
epochs = {epochs}
eval_every_epochs = 1
log_every = 1000
[run]
output_dir = "{folder}"
"""


class Compute(nn.Module):
    """Sleeps as long as this group would compute."""

    def __init__(self) -> None:
        super().__init__()
        joined = join_info()
        assert joined is not None
        self._seconds = PASS * (TIMES if joined.replica_group == SLOW else 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(self._seconds)
        return x


def build() -> nn.Module:
    """Return the model of the job file."""
    return nn.Sequential(Compute(), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def slow(data: Path, *, quick: bool, seeds: int) -> tuple[list[Row], list[Goal]]:
    epochs, seeds = (3, 1) if quick else (EPOCHS, seeds)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(1, seeds + 1):
            for who in (ALL, QUORUM):
                folder = Path(temporary) / f"{who} {seed}"
                rows.append(train(who, folder, data / "digits.h5", epochs, seed))
    ratios = [ratio for seed in range(1, seeds + 1) if (ratio := over_all(rows, seed)) is not None]
    table = [
        (row["who"], row["seed"], f"{row['seconds'][-1]:.1f}", f"{row['losses'][-1]:.4f}", row["left_out"])
        for row in rows
    ]
    print_table(table, ["synchronization", "seed", "seconds", "test loss", "times a group was left out"])
    missed = seeds - len(ratios)
    goals = [Goal("runs with a quorum that did not reach the loss", missed, 0)]
    if ratios:
        spread = Spread.of(ratios)
        print(f"time to the same loss, quorum over waiting for all: {spread}")
        goals.append(Goal("time to the same loss over waiting for all", spread.median, RATIO))
    return rows, goals


def train(who: str, folder: Path, store: Path, epochs: int, seed: int) -> Row:
    """Return the test loss after each epoch, and the seconds since the first synchronization."""
    quorum = f"quorum = 3\ngrace_s = {GRACE}" if who == QUORUM else ""
    length = round(epochs * LONGER) if who == QUORUM else epochs
    job = folder.with_suffix(".toml")
    text = JOB.format(store=store.resolve(), quorum=quorum, epochs=length, seed=seed, folder=folder)
    job.write_text(text)
    programs.run(
        [sys.executable, "-m", "hpcsgd", "launch", str(job), "--groups", str(GROUPS)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}, timeout=1800,
    )  # fmt: skip
    events = event_log.read(folder / "events.jsonl")
    commits = [event for event in events if event["event"] == "commit"]
    at = {event["epoch"]: event["at"] - commits[0]["at"] for event in commits if not event["fraction"]}
    losses = {each["epoch"]: each["loss"] for each in records.of_run(folder) if each["kind"] == "eval"}
    both = sorted(at.keys() & losses.keys())
    left_out = sum(event["event"] == "lost" and event["kind"] == event_log.Loss.LATE for event in events)
    curve = {"seconds": [at[i] for i in both], "losses": [losses[i] for i in both]}
    return {"who": who, "seed": seed, **curve, "left_out": left_out}


def over_all(rows: list[Row], seed: int) -> float | None:
    """Return the ratio of the times to the loss with which the run that waits for all ends."""
    of = {row["who"]: row for row in rows if row["seed"] == seed}
    mine = of[QUORUM]
    seconds = reached(mine["seconds"], mine["losses"], of[ALL]["losses"][-1])
    return None if seconds is None else seconds / of[ALL]["seconds"][-1]
