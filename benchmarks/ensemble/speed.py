"""`ensemble.py --speed`: the EnsembleSync paper's table, scaled down, on two hosts with a slow link.

The paper trains ResNet-10 on 2 workers with 293 steps per epoch. 100 epochs take 412.2, 397.9 and 60.95
minutes with sync SGD, async SGD and EnsembleSync. A synchronization moves as many bytes as a step of sync
SGD, and there are 10 per epoch. So the times give the ratio r of communication to computing in a step of sync
SGD: (1 + r) / (1 + r/29.3) = 412.2 / 60.95. The link here is made slow enough that moving a gradient takes r
times as long as computing it.

Seconds per step are those of ResNet-8 with batch 16 per rank on hosts with that link. The hosts are network
namespaces, which need root. Contestants run in turn, and the slowest rank counts. Accuracies are those of
benchmarks/jobs/cifar10_resnet8.toml without the link, after the same number of epochs. The link does not
change the arithmetic, except that it changes which rank is late in async SGD. Time in the picture is steps
times seconds per step. Sync SGD has one group with twice the job file's batch and learning rate. The other
methods have two groups, so that linear scaling doubles their learning rate.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from ensemble.coordinators import coordinator
from ensemble.speed_picture import draw
from harness import Goal, Spread, mpiexec, print_table, programs, start
from harness.hosts import on_hosts, shaped_hosts
from harness.stores import first_images
from hpcsgd.data import ImageDataset, convert
from hpcsgd.report.records import of_run

MINUTES = {"sync SGD": 412.2, "async SGD": 397.9, "EnsembleSync": 60.95}
"""Minutes of 100 epochs in the paper."""
SYNCS = 10
"""Synchronizations per epoch."""
WON = MINUTES["sync SGD"] / MINUTES["EnsembleSync"]
PER_EPOCH = 37500 / 128
RATIO = (WON - 1) / (1 - WON * SYNCS / PER_EPOCH)
GOAL = 6.6
NOISE = 0.75
"""Points of accuracy by which EnsembleSync may be behind sync SGD."""
EVERY = 31
IMAGES = 10_000
METHODS = {
    "sync SGD": 'name = "bsp"',
    "async SGD": 'name = "async_sgd"',
    "EnsembleSync": 'name = "ensemble_sync"\nsync_every = {every}',
    "with natural gradient": 'name = "ensemble_sync"\nsync_every = {every}',
}
JOB = Path(__file__).parents[1] / "jobs" / "cifar10_resnet8.toml"
HEAD = "who,ms/step,s/epoch,speed over sync SGD,paper,accuracy %"


def speed(
    data: Path, *, quick: bool, rounds: int, epochs: int, seeds: int, plot: Path | None
) -> tuple[list[dict[str, Any]], list[Goal], dict[str, Any]]:
    """Time and train all contestants; return rows, goals and the setting."""
    methods = list(METHODS)
    if quick:
        rounds, epochs, seeds, methods = 1, 1, 1, ["sync SGD", "EnsembleSync"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows, setting = _timed(folder, rounds)
        store = images(data, folder / "store.h5", quick=quick)
        per_epoch = -(-len(ImageDataset(store, "train")) // 2 // 16)
        trained = [train(who, store, folder, per_epoch, epochs, seed, quick=quick)
                   for seed in range(1, seeds + 1) for who in methods]  # fmt: skip
    for row in rows:
        row["steps_an_epoch"] = per_epoch
    score = {who: mean(run["accuracy"][-1] for run in trained if run["who"] == who) for who in methods}
    print(_told(setting))
    print(f"accuracies after {epochs} epochs, {seeds} seeds")
    print_table((_cells(row, score.get(row["who"])) for row in rows), HEAD.split(","))
    if plot is not None:
        draw(plot, rows, trained)
    return rows + trained, _goals(rows, score, setting["move_s"]), setting


def _told(setting: dict[str, Any]) -> str:
    computing, moving = (f"{1e3 * setting[key]:.0f} ms" for key in ("compute_s", "move_s"))
    size, rate = setting["bytes"] / 1e6, setting["rate_bit_per_s"] / 1e6
    link = f"moving {size:.2f} MB at {rate:.2f} Mbit/s {moving}, {RATIO:.1f} times as long"
    return f"computing {computing} per step, {link}; a synchronization every {EVERY} steps"


def _timed(folder: Path, rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Time computing alone, which determines the rate of the link, and then all contestants on that link."""
    script, out = Path(__file__).with_name("speed_rank.py"), folder / "rows.json"
    arguments = ["--out", str(out), "--rounds", str(rounds), "--every", str(EVERY)]
    start([mpiexec(), "-n", "2"], script, arguments, timeout=600)
    alone = json.loads(out.read_text())[0]
    c, size = alone["seconds_a_step"]["median"], alone["bytes"]
    rate = 8 * size / (RATIO * c)
    with (
        shaped_hosts(2, f"{rate:.0f}bit", burst="16kb") as name,
        coordinator(
            2, folder / "replica_groups", host="10.77.0.254", launcher=("ip", "netns", "exec", f"{name}-0")
        ) as invited,
    ):
        on_hosts(name, 2, script, [*arguments, *invited], timeout=1800)
    setting = {"compute_s": c, "bytes": size, "rate_bit_per_s": rate, "move_s": 8 * size / rate}
    return json.loads(out.read_text()), setting


def images(data: Path, target: Path, *, quick: bool) -> Path:
    """Write the dataset file that all contestants train on; return its path."""
    if quick:
        convert("digits", None, target)
        return target
    return first_images(data / "cifar10.h5", IMAGES, target)


def train(
    who: str, store: Path, folder: Path, per_epoch: int, epochs: int, seed: int, *,
    quick: bool, share: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train with `hpcsgd train` or `hpcsgd launch`; return the accuracy after each epoch, and the distances.

    `per_epoch`: the number of steps in an epoch. `share`: the fraction of the samples that a group has in an
    epoch. If None, the groups divide the samples among themselves.
    """
    together = who == "sync SGD"
    every = max(1, per_epoch // SYNCS)
    run = folder / f"{who} {share} {seed}"
    job = folder / "job.toml"
    head, rest = JOB.read_text().split("[method]\n")
    if who == "with natural gradient":
        head = head.replace("[optimizer]\n", "[optimizer]\nnatural_gradient = { rank = 20 }\n")
    training = rest[rest.index("[training]") :]
    job.write_text(f"{head}[method]\n{METHODS[who].format(every=every)}\n{training}")
    words: dict[str, object] = {
        "seed": seed, "data.path": store, "data.group_batch_size": 32 if together else 16,
        "optimizer.lr": 0.05 if together else 0.025, "training.epochs": epochs, "training.threads": 1,
        "lr_schedule.arguments.T_max": epochs, "run.output_dir": run, "parallel.groups": 1 if together else 2,
    }  # fmt: skip
    if share is not None:
        words["data.overlap_share"] = share
    if quick:
        words["model.arguments.channels"] = 1
    overrides = [word for key, value in words.items() for word in (f"--{key}", str(value))]
    replica_groups = "ensemble" in METHODS[who]
    launcher = [] if replica_groups else [mpiexec(), "-n", "2"]
    verb = "launch" if replica_groups else "train"
    command = [*launcher, sys.executable, "-m", "hpcsgd", verb, str(job), *overrides]
    programs.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=3600)
    records = list(of_run(run))
    accuracy = [r["accuracy"] for r in records if r["kind"] == "eval"]
    distances = [(r["step"], r["distance"]) for r in records if r["kind"] == "sync"]
    print(f"{who}, seed {seed}: accuracy {accuracy[-1]:.4f}", flush=True)
    return {"who": who, "seed": seed, "epochs": epochs, "accuracy": accuracy, "distances": distances}


def _goals(rows: list[dict[str, Any]], score: dict[str, float], move: float) -> list[Goal]:
    """Return the goals. The last one checks that the first is fair.

    If other programs used the machine while computing alone was measured, the link is slower than intended.
    """
    by_name = {row["who"]: row for row in rows}
    slower = 1 / by_name["EnsembleSync"]["speed_over_sync"]["median"]
    behind = 100 * (score["sync SGD"] - score["EnsembleSync"])
    ratio = move / by_name["compute only"]["seconds_a_step"]["median"]
    return [
        Goal("seconds of EnsembleSync over sync SGD", slower, 1 / GOAL),
        Goal("points of accuracy of EnsembleSync behind sync SGD", behind, NOISE),
        Goal("moving over computing in the same run, times the paper's", ratio / RATIO, 1.1),
    ]


def _cells(row: dict[str, Any], accuracy: float | None) -> list[object]:
    who, step = row["who"], row["seconds_a_step"]["median"]
    paper = f"{MINUTES['sync SGD'] / MINUTES[who]:.2f}" if who in MINUTES else ""
    return [
        who,
        f"{1e3 * step:.1f}",
        f"{step * row['steps_an_epoch']:.1f}",
        Spread(**row["speed_over_sync"]),
        paper,
        "" if accuracy is None else f"{100 * accuracy:.2f}",
    ]
