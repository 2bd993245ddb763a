"""`selsync.py --partition` and `--non-iid`: how samples are divided among workers that rarely synchronize."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness import Goal, print_table
from hpcsgd.data import ImageDataset
from hpcsgd.files.pictures import STYLE, save
from selsync.trainings import BATCH, here, job, train

WORKERS, LABELS = 8, 10
DELTA = 0.5
"""A value that gives a high LSSR, as the paper asks for."""
SEEDS = 2
EPOCHS = 8


def partitions(
    store: Path, quick: bool, plot: Path | None
) -> tuple[list[dict[str, Any]], list[Goal], dict[str, Any]]:
    """Compare partitions, and parameter with gradient aggregation.

    The paper: SelDP 90.86 %, DefDP 64.1 % (GA, VGG11, δ = 0.25); PA 91.42, GA 90.86 (SelDP).
    """
    del plot
    workers, seeds = (2, 1) if quick else (WORKERS, SEEDS)
    epochs = workers if quick else EPOCHS
    steps = len(ImageDataset(store, "train")) // (BATCH * workers) * epochs
    rows = []
    for partition, passes in (("seldp", epochs // workers), ("defdp", epochs)):
        for aggregate in ("parameters", "gradients"):
            for seed in range(1, seeds + 1):
                method = {"name": "selsync", "delta": DELTA, "aggregate": aggregate}
                data = {"partition": {"name": partition}}
                table = job(store, method, workers, passes, seed, steps=steps, **data)
                found = train(here(workers), table)
                rows.append({"partition": partition, "aggregate": aggregate, "seed": seed, **found})
                print(f"{partition}, {aggregate}, seed {seed}: {found['accuracy']:.4f}", flush=True)

    def score(partition: str, aggregate: str) -> float:
        return mean(
            100 * row["accuracy"]
            for row in rows
            if (row["partition"], row["aggregate"]) == (partition, aggregate)
        )

    pairs = dict.fromkeys((row["partition"], row["aggregate"]) for row in rows)
    print_table([[*pair, f"{score(*pair):.2f}"] for pair in pairs], ["partition", "aggregate", "accuracy %"])
    goals = [
        Goal("points of accuracy that DefDP is ahead of SelDP, by parameters",
             score("defdp", "parameters") - score("seldp", "parameters"), 0),
        Goal("points of accuracy that DefDP is ahead of SelDP, by gradients",
             score("defdp", "gradients") - score("seldp", "gradients"), 0),
        Goal("points of accuracy that GA is ahead of PA, with SelDP",
             score("seldp", "gradients") - score("seldp", "parameters"), 0),
    ]  # fmt: skip
    return rows, goals, {}


def non_iid(
    store: Path, quick: bool, plot: Path | None
) -> tuple[list[dict[str, Any]], list[Goal], dict[str, Any]]:
    """Train ten workers with one label each; (α, β, δ) as in the paper's figure 12, and FedAvg (1, 0.1)."""
    workers = 2 if quick else LABELS
    epochs = 1 if quick else EPOCHS
    label = {"partition": {"name": "by_label"}}
    contestants: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "FedAvg (1, 0.1)": ({"name": "fedavg", "per_epoch": 10}, label),
        "SelSync δ = 0.3": ({"name": "selsync", "delta": 0.3}, label),
        "SelSync (0.5, 0.5, 0.05)": ({"name": "selsync", "delta": 0.05}, injected(label, 0.5, 0.5)),
        "SelSync (0.5, 0.5, 0.3)": ({"name": "selsync", "delta": 0.3}, injected(label, 0.5, 0.5)),
        "SelSync (0.75, 0.75, 0.3)": ({"name": "selsync", "delta": 0.3}, injected(label, 0.75, 0.75)),
    }
    rows = []
    for name, (method, data) in contestants.items():
        found = train(here(workers), job(store, method, workers, epochs, **data))
        rows.append({"who": name, **found})
        print(f"{name}: {found['accuracy']:.4f}", flush=True)
    print_table(
        [[r["who"], r["steps"], f"{r['lssr']:.3f}", f"{100 * r['accuracy']:.2f}",
          f"{r['bytes_per_phase'].get('injection', 0) / 1e6:.1f}"] for r in rows],
        ["who", "steps", "LSSR", "accuracy %", "MB injected by rank 0"],
    )  # fmt: skip
    if plot:
        draw(plot, rows)
    score = {row["who"]: 100 * row["accuracy"] for row in rows}
    ahead = score["SelSync δ = 0.3"] - score["SelSync (0.75, 0.75, 0.3)"]
    return rows, [Goal("points of accuracy that no injection is ahead of (0.75, 0.75)", ahead, 0)], {}


def injected(data: dict[str, Any], alpha: float, beta: float) -> dict[str, Any]:
    return {**data, "injection": {"alpha": alpha, "beta": beta}}


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 4.6), layout="constrained", dpi=120)
        _draw(figure.subplots(), rows)
        save(figure, path)


def _draw(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for row, marker in zip(rows, "os^vD", strict=False):
        steps, accuracy = [t for t, _, _ in row["curve"]], [100 * a for _, _, a in row["curve"]]
        label = re.sub(r"\((\S+), (\S+), (\S+)\)", r"δ = \3, injection (\1, \2)", row["who"])
        axes.plot(steps, accuracy, marker=marker, mfc="none", ms=6, label=label)
    axes.set(xlabel="step", ylabel="test accuracy, %", title="one label per worker")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
