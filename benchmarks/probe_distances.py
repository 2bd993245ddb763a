"""Does the probe's short ramp tell what the job's whole warm-up tells? Distances for P = 2 … 32, both ways.

    hpcsgd data convert cifar10 ARCHIVE DATA/cifar10.h5
    python benchmarks/probe_distances.py --data DATA [--job NAME] [--json FILE] [--plot FILE]

For CIFAR-10 / ResNet-20 at the setting of the hierarchical local SGD paper, beside its figure 4, or another
job of benchmarks/jobs; what else is given, as --schedule.warmup_epochs 2, changes the job. The long way goes
through the whole warm-up (--long: for which P; it costs as many epochs for each). In both cases --meetings at
the full rate follow. --quick: a minute, of digits.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from functools import partial
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import Goal, machine, print_goals, print_table, write_json
from matplotlib.figure import Figure
from virtual import GROUPS, alone, in_processes, job, where

from hpcsgd.data import Store, convert
from hpcsgd.training.config import Config
from hpcsgd.training.probing import plan_of
from hpcsgd.training.virtual import virtual_groups
from hpcsgd.transport import Transport
from hpcsgd.tuning.growth import WINDOW, growths_of, verdict
from hpcsgd.tuning.probe import Plan
from hpcsgd.tuning.replicas import DivergedError

PAPER = {2: 0.85, 4: 1.95, 8: 3.2, 16: 3.2, 32: 3.2}
"""Figure 4, read by eye; "flat" from 8 on."""


def warm_up(config: Config, P: int, way: str) -> int:
    """Steps."""
    if way == "ramp":
        plan = a_plan(config)
        return plan.ramp * plan.every
    per_epoch = -(-(len(Store(config.data.store, "train")) // P) // config.data.batch_size)
    return round(config.schedule.warmup_epochs * per_epoch)


def a_plan(config: Config) -> Plan:
    return plan_of(config, Path("job"), None, 1)


def distances(
    config: Config, P: int, way: str, seed: int, at_full_rate: int, device: torch.device
) -> dict[str, Any]:
    """D at every meeting."""
    every, steps = config.method.arguments["every"], warm_up(config, P, way)
    row: dict[str, Any] = {"P": P, "way": way, "seed": seed, "warm_up_steps": steps, "distances": []}
    began = time.perf_counter()

    def work(world: Transport) -> None:
        groups = virtual_groups(config, P, 1, world, warm_up_steps=steps, device=device)
        try:
            for _ in range(-(-steps // every) + at_full_rate):
                groups.train(every)
                row["distances"].append(round(groups.meet(), 5))
        except DivergedError as error:
            row["diverged"] = str(error)

    alone(work)
    told = " ".join(f"{D:.3f}" for D in row["distances"][-at_full_rate:])
    print(f"P = {P}, {way}, seed {seed}: {time.perf_counter() - began:.0f} s, D = {told}", flush=True)
    return row | {"at_full_rate": at_full_rate, "seconds": round(time.perf_counter() - began, 1)}


def by_way(rows: list[dict[str, Any]]) -> dict[str, dict[int, list[list[float]]]]:
    """The series of every way and P, a series a seed, without those that diverged."""
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
        D = median(d for one in of_seeds for d in one[-WINDOW:])
        g = growths.get(P)
        rho = f"{g.rho:.2f} ({g.low:.2f}–{g.high:.2f})" if g else ""
        lines.append([way, P, f"{D:.3f}", rho, PAPER[P] if paper else ""])
    return lines


TITLES = {"ramp": "the ramp of the probe", "long": "the whole warm-up"}


def draw(path: Path, rows: list[dict[str, Any]], name: str) -> None:
    """Both ways side by side, against the number of the meeting."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    ways = sorted({row["way"] for row in rows}, reverse=True)
    ordered = sorted(rows, key=lambda row: (row["P"], row["seed"]))
    for axes, way in zip(figure.subplots(1, len(ways), sharey=True, squeeze=False)[0], ways, strict=True):
        for row in (row for row in ordered if row["way"] == way):
            label = f"P = {row['P']}" if row["seed"] == ordered[0]["seed"] else None
            meetings = range(1, len(row["distances"]) + 1)
            axes.plot(meetings, row["distances"], ".-", color=f"C{GROUPS.index(row['P'])}", label=label)
        axes.set(xlabel="meeting", title=f"{name}: {TITLES[way]}")
        axes.legend()
    figure.axes[0].set_ylabel("distance D")
    figure.savefig(path, dpi=120)


def goals(ways: dict[str, dict[int, list[list[float]]]], paper: bool) -> list[Goal]:
    answers = {way: verdict(min(series), growths_of(series)).P for way, series in ways.items()}
    found = []
    if "long" in answers:
        found.append(
            Goal("factors of 2 between the ramp's answer and the long way's", apart(*answers.values()), 0)
        )
    if paper:
        found.append(
            Goal("factors of 2 between the ramp's answer and the paper's", apart(answers["ramp"], 4), 0)
        )
    return found


def apart(P: int, Q: int) -> float:
    return abs(log2(P) - log2(Q))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(description="Distances by the probe's ramp and by the whole warm-up.")
    parser.add_argument("--data", type=Path, default=Path(), help="the folder with the stores")
    parser.add_argument("--job", default="cifar10_resnet20")
    parser.add_argument("--long", type=numbers, default=[2, 4, 8], metavar="P,P,…")
    parser.add_argument("--meetings", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--quick", action="store_true", help="a minute: that it runs, not what it measures")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given, overrides = parser.parse_known_args()
    here = machine() | where(given.device)
    with tempfile.TemporaryDirectory() as folder:
        if given.quick:
            given.job, given.data, given.long = "digits_cnn", Path(folder), [2, 4]
            convert("digits", None, given.data / "digits.h5")
        tasks = [
            partial(distances, seeded, P, way, seed, given.meetings, given.device)
            for seed in range(1, given.seeds + 1)
            for seeded in [replace(job(given.job, given.data, overrides), seed=seed)]
            for P, way in [*((P, "ramp") for P in GROUPS if P > 1), *((P, "long") for P in given.long)]
        ]
        rows = list(in_processes(given.processes, tasks))
    paper = given.job == "cifar10_resnet20"
    ways = by_way(rows)
    head = ["way", "P", "D", "ρ (quartiles)", "paper's D"]
    print_table([line for way, series in ways.items() for line in cells(way, series, paper)], head)
    for way, series in ways.items():
        print(f"{way}: {verdict(min(series), growths_of(series))}")
    print_goals(goals(ways, paper))
    if given.json:
        write_json(given.json, rows, goals(ways, paper), here)
    if given.plot:
        draw(given.plot, rows, given.job)


if __name__ == "__main__":
    main()
