"""Does the probe's short ramp predict the job's whole warm-up? Distances for P = 2 … 32, both ways.

    hpcsgd data convert cifar10 ARCHIVE DATA/cifar10.h5
    python benchmarks/probe_distances.py --data DATA [--job NAME] [--json FILE] [--plot FILE]

The job is CIFAR-10 / ResNet-20 at the setting of the hierarchical local SGD paper, compared with its figure
4, or another job of benchmarks/jobs. Further options, such as --lr_schedule.warmup_epochs 2, change the job.

There are three ways: the probe's (a model trained alone for --settle steps, then a ramp), a ramp from the
first step on, and the job's whole warm-up. --long and --short name the values of P for the last two. The
whole warm-up takes as many epochs for each P. In all cases synchronizations at the full learning rate follow,
as many as --synchronizations says. With --keep FILE, what an earlier --json FILE has of the same setting is
not measured again.
--quick takes a minute and trains on digits.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure

from harness import Goal, Run, WallClock, in_processes, print_table
from hpcsgd.comm import Communicator
from hpcsgd.config.schema import Config
from hpcsgd.data import ImageDataset, convert
from hpcsgd.performance.probing.job_file import plan_of
from hpcsgd.performance.probing.probe import Plan, settle
from hpcsgd.performance.probing.replicas import DivergedError, VirtualGroups
from hpcsgd.performance.probing.virtual import virtual_groups
from hpcsgd.train.growth import COMPARED, growths_of, verdict
from probe.virtual import GROUPS, alone, job, where

PROBE, SHORT, LONG = "probe", "short ramp", "whole warm-up"
SHORT_RAMP = 4
"""Number of synchronizations."""
PAPER = {2: 0.85, 4: 1.95, 8: 3.2, 16: 3.2, 32: 3.2}
"""Values of figure 4, read by eye; the paper calls the curve "flat" from 8 on."""


@dataclass(frozen=True)
class Task:
    """One training to measure."""

    config: Config
    P: int
    way: str
    seed: int
    at_full_rate: int
    """Number of synchronizations."""
    device: torch.device

    def key(self) -> dict[str, Any]:
        """Return the entries that distinguish its row from others."""
        settled, warm_up = self._phases()
        setting = {"job": str(self.config.model.name), "way": self.way, "P": self.P, "seed": self.seed}
        return setting | {"settled": settled, "warm_up_steps": warm_up, "at_full_rate": self.at_full_rate}

    def measured(self) -> dict[str, Any]:
        """Train, and return the row: D at every synchronization."""
        clock = WallClock()
        row = self.key() | {"distances": []}
        try:
            row["distances"] = alone(self._distances)
        except DivergedError as error:
            row["diverged"] = str(error)
        seconds = round(clock.stop(), 1)
        told = " ".join(f"{D:.3f}" for D in row["distances"][-self.at_full_rate :])
        print(f"P = {self.P}, {self.way}, seed {self.seed}: {seconds:.0f} s, D = {told}", flush=True)
        return row | {"seconds": seconds}

    def _plan(self) -> Plan:
        return plan_of(self.config, Path("job"), None, 1)

    def _phases(self) -> tuple[int, int]:
        """Return the number of steps of one model alone, and of the warm-up."""
        plan = self._plan()
        if self.way == LONG:
            samples = len(ImageDataset(self.config.data.path, "train"))
            batches = -(-(samples // self.P) // self.config.data.group_batch_size)
            return 0, round(self.config.lr_schedule.warmup_epochs * batches)
        if self.way == SHORT:
            return 0, SHORT_RAMP * plan.sync_every
        return plan.settle, plan.ramp * plan.sync_every

    def _distances(self, world: Communicator) -> list[float]:
        (settled, warm_up), every = self._phases(), self.config.method.arguments["sync_every"]

        def start(P: int, seed: int, hosts: Communicator) -> VirtualGroups:
            config = replace(self.config, seed=seed)
            return virtual_groups(config, P, 1, hosts, warm_up_steps=warm_up, device=self.device)

        groups = start(self.P, self.seed, world)
        if settled:
            groups.start_from(settle(start, self._plan(), world, self.seed))
        found = []
        for _ in range(-(-warm_up // every) + self.at_full_rate):
            groups.train(every)
            found.append(round(groups.synchronize(), 5))
        return found


def by_way(rows: list[dict[str, Any]]) -> dict[str, dict[int, list[list[float]]]]:
    """Return the series of each way and P, one per seed, without those that diverged."""
    found: dict[str, dict[int, list[list[float]]]] = {}
    for row in sorted(rows, key=lambda row: (row["way"], row["P"], row["seed"])):
        if "diverged" not in row:
            series = row["distances"][-row["at_full_rate"] :]
            found.setdefault(row["way"], {}).setdefault(row["P"], []).append(series)
    return found


def cells(way: str, series: dict[int, list[list[float]]], paper: bool) -> list[list[object]]:
    growths = {g.further: g for g in growths_of(series)}
    lines: list[list[object]] = []
    for P, of_seeds in series.items():
        D = median(d for one in of_seeds for d in one[-COMPARED:])
        g = growths.get(P)
        rho = f"{g.rho:.2f} ({g.low:.2f}–{g.high:.2f})" if g else ""
        lines.append([way, P, f"{D:.3f}", rho, PAPER[P] if paper else ""])
    return lines


def draw(path: Path, rows: list[dict[str, Any]], name: str) -> None:
    """Draw the ways next to each other, against the number of the synchronization."""
    ways = [way for way in (PROBE, SHORT, LONG) if way in {row["way"] for row in rows}]
    figure = Figure(figsize=(4.5 * len(ways), 4), layout="constrained")
    ordered = sorted(rows, key=lambda row: (row["P"], row["seed"]))
    for axes, way in zip(figure.subplots(1, len(ways), sharey=True, squeeze=False)[0], ways, strict=True):
        for row in (row for row in ordered if row["way"] == way):
            label = f"P = {row['P']}" if row["seed"] == ordered[0]["seed"] else None
            numbers = range(1, len(row["distances"]) + 1)
            axes.plot(numbers, row["distances"], ".-", color=f"C{GROUPS.index(row['P'])}", label=label)
        axes.set(xlabel="synchronization", title=f"{name}: {way}", yscale="log")
        axes.legend()
    figure.axes[0].set_ylabel("distance D")
    figure.savefig(path, dpi=120)


def goals(ways: dict[str, dict[int, list[list[float]]]], paper: bool) -> list[Goal]:
    """Return the goals, compared with the whole warm-up for the values of P for which it was made."""
    title = "factors of 2 between the probe's answer and"
    found = []
    if long := ways.get(LONG):
        as_far = {P: series for P, series in ways[PROBE].items() if P in long}
        found.append(Goal(f"{title} the {LONG}'s", apart(answer(as_far), answer(long)), 0))
    if paper:
        found.append(Goal(f"{title} the paper's", apart(answer(ways[PROBE]), 4), 0))
    return found


def answer(series: dict[int, list[list[float]]]) -> int:
    return verdict(min(series), growths_of(series)).P


def belonging(rows: list[dict[str, Any]], tasks: list[Task]) -> list[dict[str, Any]]:
    """Return the rows of these tasks."""
    keys = [task.key() for task in tasks]
    return [row for row in rows if {name: row.get(name) for name in keys[0]} in keys]


def apart(P: int, Q: int) -> float:
    return abs(log2(P) - log2(Q))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(description="Distances by the probe's ramp and by the whole warm-up.")
    parser.add_argument("--data", type=Path, default=Path(), help="the folder with the dataset files")
    parser.add_argument("--job", default="cifar10_resnet20")
    parser.add_argument("--groups", type=numbers, default=GROUPS[1:], metavar="P,P,…")
    parser.add_argument("--long", type=numbers, default=[2, 4, 8], metavar="P,P,…")
    parser.add_argument("--short", type=numbers, default=[2, 4, 8], metavar="P,P,…")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="an earlier --json FILE")
    parser.add_argument("--synchronizations", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--quick", action="store_true", help="check within a minute that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given, overrides = parser.parse_known_args()
    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        if given.quick:
            given.job, given.data, given.long, given.short = "digits_cnn", Path(folder), [2, 4], [2]
            convert("digits", None, given.data / "digits.h5")
        ways = [(P, PROBE) for P in given.groups]
        ways += [(P, SHORT) for P in given.short] + [(P, LONG) for P in given.long]
        tasks = [
            Task(
                replace(job(given.job, given.data, overrides), seed=seed),
                P,
                way,
                seed,
                given.synchronizations,
                given.device,
            )
            for seed in range(1, given.seeds + 1)
            for P, way in ways
        ]
        rows = belonging(run.kept(given.keep), tasks)
        done = [{name: row[name] for name in tasks[0].key()} for row in rows]
        missing = [partial(Task.measured, task) for task in tasks if task.key() not in done]
        rows += in_processes(given.processes, missing)
    paper = given.job == "cifar10_resnet20"
    series = by_way(rows)
    head = ["way", "P", "D", "ρ (quartiles)", "paper's D"]
    print_table([line for way, found in series.items() for line in cells(way, found, paper)], head)
    for way, found in series.items():
        print(f"{way}: {verdict(min(found), growths_of(found))}")
    run.conclude(rows, goals(series, paper), given.json, where(given.device))
    if given.plot:
        draw(given.plot, rows, given.job)


if __name__ == "__main__":
    main()
