"""Is the probe's P right? The accuracy of P = 1 … 32 groups after some epochs, and the probe's verdict.

    hpcsgd data convert digits DATA/digits.h5
    hpcsgd data convert mnist FOLDER DATA/mnist.h5
    hpcsgd data convert cifar10 ARCHIVE DATA/cifar10.h5
    python benchmarks/probe_vs_accuracy.py --data DATA [--jobs NAME …] [--json FILE] [--plot FILE]

The jobs are those of benchmarks/jobs. All P·K ranks are virtual, so the benchmark uses --processes processes
and no MPI. With --keep FILE, probes and trainings in an earlier --json FILE are not repeated. --quick takes a
minute and trains on digits only.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import log2
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from harness import Goal, Run, WallClock, in_processes, print_table
from harness.stores import first_images
from hpcsgd.comm import Communicator
from hpcsgd.config.schema import Config
from hpcsgd.data import ImageDataset, convert
from hpcsgd.files.pictures import STYLE, save
from hpcsgd.performance.probing.job_file import plan_of, probe_config, setting
from hpcsgd.performance.probing.replicas import DivergedError
from hpcsgd.performance.probing.report import answer, to_json
from hpcsgd.performance.probing.virtual import virtual_groups
from probe.virtual import GROUPS, accuracy, alone, job, where

NAMES = ("digits_cnn", "mnist_cnn", "cifar10_small")
TITLES = {
    "digits_cnn": "digits, CNN", "mnist_cnn": "MNIST, CNN",
    "cifar10_small": "CIFAR-10, 5000 images",
}  # fmt: skip
TICKS = (0.5, 0, -0.5, -1, -2, -5, -10, -20, -50, -100)
SUBSETS = {"cifar10_small": 5000}
"""The number of images to train on; other jobs take all.

cifar10_resnet20 takes all too, and needs a GPU (--device cuda).
"""
WITHIN = 0.005
"""An accuracy within this distance below that of P = 1 counts as equally good."""
LONG = 200
"""Number of epochs of the job whose cost is compared with the cost of the probe."""
SHARE = 0.01
KEPT = 60
"""Number of distances of each training that go into the record."""


def prepared(name: str, data: Path, folder: Path, overrides: list[str]) -> Config:
    """Return the job with its dataset file."""
    config = job(name, data, overrides)
    if name not in SUBSETS:
        return config
    store = first_images(config.data.path, SUBSETS[name], folder / f"{name}.h5")
    return replace(config, data=replace(config.data, path=store))


def train(name: str, config: Config, P: int, seed: int, device: torch.device) -> dict[str, Any]:
    """Train P groups once, to the end, and return the row."""
    per_epoch = -(-(len(ImageDataset(config.data.path, "train")) // P) // config.data.group_batch_size)
    assert config.training.epochs is not None
    steps, every = config.training.epochs * per_epoch, config.method.arguments["sync_every"]
    row: dict[str, Any] = {"job": name, "P": P, "seed": seed, "accuracy": None, "diverged": None}
    distances: list[float] = []
    clock = WallClock()

    def work(world: Communicator) -> None:
        groups = virtual_groups(replace(config, seed=seed), P, 1, world, device=device)
        try:
            for done in range(0, steps, every):
                groups.train(min(every, steps - done))
                distances.append(groups.synchronize())
            row["accuracy"] = accuracy(groups, ImageDataset(config.data.path, "test"), device)
        except DivergedError as error:
            row["diverged"] = str(error)

    alone(work)
    seconds = clock.stop()
    print(f"{name}, P = {P}, seed {seed}: {row['accuracy']} in {seconds:.0f} s", flush=True)
    thinned = [round(D, 4) for D in distances[:: -(-len(distances) // KEPT)]]
    return row | {"seconds": seconds, "syncs": len(distances), "distances": thinned}


def probe(name: str, config: Config, seeds: int, device: torch.device) -> dict[str, Any]:
    """Return the probe's verdict, the numbers behind it, and its cost."""
    plan = plan_of(config, Path(f"{name}.toml"), None, seeds)
    found = alone(lambda world: probe_config(config, plan, world, device=device))
    print(f"{name}: {answer(found)}", flush=True)
    samples = len(ImageDataset(config.data.path, "train"))
    probed = setting(config)
    probed["data"]["path"] = Path(config.data.path).name  # the folder is one of this run only
    return to_json(found, probed) | {
        "job": name,
        "share_of_job": found.samples / (LONG * samples),
    }


def parted(
    rows: list[dict[str, Any]], names: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the probes and the trainings of these jobs."""
    probes = [probed for row in rows for probed in row.get("probes", [])]
    trained = [row for row in rows if "probes" not in row]
    return [p for p in probes if p["job"] in names], [row for row in trained if row["job"] in names]


def largest_as_good(rows: list[dict[str, Any]]) -> int:
    """The largest P whose mean accuracy over the seeds is within `WITHIN` of that of P = 1."""
    accuracies = means(rows)
    return max(P for P, value in accuracies.items() if value >= accuracies[1] - WITHIN)


def means(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Return the mean accuracies over the seeds; a training that diverged counts as 0."""
    return {P: mean(row["accuracy"] or 0.0 for row in rows if row["P"] == P) for P in GROUPS}


def goals(name: str, probed: dict[str, Any], rows: list[dict[str, Any]]) -> list[Goal]:
    apart = abs(log2(probed["P"]) - log2(largest_as_good(rows)))
    return [
        Goal(f"{name}: factors of 2 between the probe's P and the largest as good as P = 1", apart, 1),
        Goal(f"{name}: samples of the probe over those of {LONG} epochs", probed["share_of_job"], SHARE),
    ]


def lines(probed: dict[str, Any], rows: list[dict[str, Any]]) -> list[list[object]]:
    """Return the rows of one job's table."""
    D = {row["P"]: row["D"] for row in probed["rows"]}
    rho = {g["to"]: g["rho"] for g in probed["growths"]}
    chosen, good = probed["P"], largest_as_good(rows)
    table = []
    for P, value in means(rows).items():
        of_seeds = [row["accuracy"] or 0.0 for row in rows if row["P"] == P]
        spread = f"{min(of_seeds):.4f}–{max(of_seeds):.4f}"
        notes = [note for note, holds in (("probe", chosen == P), ("largest as good", good == P)) if holds]
        numbers = [f"{values[P]:.3g}" if values.get(P) else "" for values in (D, rho)]
        table.append([probed["job"], P, f"{value:.4f}", spread, *numbers, ", ".join(notes)])
    return table


def draw(path: Path, probes: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Draw the accuracy against P, one panel per job, and mark the probe's answer and the tolerance.

    The y axis has points of accuracy from P = 1, and is linear inside the tolerance and logarithmic outside.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(max(4.5, 3 * len(probes)), 4.2), layout="constrained", dpi=120)
        panels = figure.subplots(1, len(probes), squeeze=False, sharey=True)[0]
        for axes, probed in zip(panels, probes, strict=True):
            _panel(axes, probed, [row for row in rows if row["job"] == probed["job"]])
        panels[0].set_ylabel("points of test accuracy from P = 1")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        save(figure, path)


def _panel(axes: Axes, probed: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    accuracies = means(rows)
    points = {P: 100 * (value - accuracies[1]) for P, value in accuracies.items()}
    tolerance = 100 * WITHIN
    axes.axhspan(-tolerance, tolerance, color="0.9", label="within 0.5 points of P = 1")
    axes.plot(list(points), list(points.values()), "o-", label="averaged model, mean of the seeds")
    seeds = [100 * ((row["accuracy"] or 0) - accuracies[1]) for row in rows]
    axes.plot([row["P"] for row in rows], seeds, "_", color="C0", ms=12, label="each seed")
    axes.axvline(probed["P"], color="C3", ls="--", label="the probe's answer")
    axes.set_xscale("log", base=2)
    axes.set_xticks(GROUPS, map(str, GROUPS))
    axes.set_yscale("symlog", linthresh=tolerance)
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.yaxis.set_minor_locator(NullLocator())
    title = TITLES.get(probed["job"], probed["job"])
    axes.set(xlabel="groups P", title=f"{title}\nP = 1: {accuracies[1]:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The accuracy of P groups and the probe's verdict.")
    parser.add_argument("--data", type=Path, default=Path(), help="the folder with the dataset files")
    parser.add_argument("--jobs", nargs="+", default=NAMES, metavar="NAME")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="an earlier --json FILE")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--quick", action="store_true", help="check within a minute that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given = parser.parse_args()
    run = Run(timed=False)
    overrides: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        if given.quick:
            given.jobs, given.data, overrides = ["digits_cnn"], Path(folder), ["--training.epochs", "3"]
            convert("digits", None, given.data / "digits.h5")
        probes, rows = parted(run.kept(given.keep), given.jobs)
        probed = {each["job"] for each in probes}
        trained = {row["job"] for row in rows}
        configs = {
            name: prepared(name, given.data, Path(folder), overrides)
            for name in given.jobs
            if name not in probed & trained
        }
        probes += [
            probe(name, config, given.seeds, given.device)
            for name, config in configs.items()
            if name not in probed
        ]
        tasks = [
            partial(train, name, config, P, seed, given.device)
            for name, config in configs.items()
            if name not in trained
            for seed in range(1, given.seeds + 1)
            for P in GROUPS
        ]
        rows += in_processes(given.processes, tasks)
    rows.sort(key=lambda row: (row["job"], row["P"], row["seed"]))
    found = [(probed, [row for row in rows if row["job"] == probed["job"]]) for probed in probes]
    head = ["job", "P", "accuracy", "of the seeds", "D", "ρ", ""]
    print_table([line for probed, mine in found for line in lines(probed, mine)], head)
    reached = [goal for probed, mine in found for goal in goals(probed["job"], probed, mine)]
    run.conclude([{"probes": probes}, *rows], reached, given.json, where(given.device))
    if given.plot:
        draw(given.plot, probes, rows)


if __name__ == "__main__":
    main()
