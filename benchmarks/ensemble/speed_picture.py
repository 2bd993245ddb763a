"""Draw the picture of `speed.py`: accuracy against time, and the model distances at synchronizations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

Row = dict[str, Any]


def draw(path: Path, rows: Sequence[Row], trained: Sequence[Row]) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, who in enumerate(dict.fromkeys(run["who"] for run in trained)):
        runs = [run for run in trained if run["who"] == who]
        timed = next(row for row in rows if row["who"] == who)
        per_epoch = timed["seconds_a_step"]["median"] * timed["steps_an_epoch"]
        _accuracy(left, f"C{number}", who, runs, per_epoch)
        if runs[0]["distances"]:
            _distances(right, f"C{number}", who, runs, timed["steps_an_epoch"])
    left.set(xlabel="minutes, steps times seconds a step", ylabel="test accuracy, %")
    left.set_xscale("log")
    left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.xaxis.set_major_formatter("{x:g}")
    left.xaxis.set_minor_formatter(NullFormatter())
    left.legend(fontsize="small")
    right.set(xlabel="epochs", ylabel="‖W$_i$ − mean‖ at a synchronization")
    right.set_ylim(bottom=0)
    right.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _accuracy(axes: Axes, color: str, who: str, runs: Sequence[Row], per_epoch: float) -> None:
    """Plot the mean over the seeds as a thick line and each seed as a thin one."""
    minutes = [(epoch + 1) * per_epoch / 60 for epoch in range(len(runs[0]["accuracy"]))]
    for run in runs:
        axes.plot(minutes, [100 * a for a in run["accuracy"]], color=color, lw=0.6, alpha=0.5)
    means = [100 * mean(values) for values in zip(*(run["accuracy"] for run in runs), strict=True)]
    axes.plot(minutes, means, "o-", color=color, ms=4, label=who)


def _distances(axes: Axes, color: str, who: str, runs: Sequence[Row], per_epoch: int) -> None:
    for number, run in enumerate(runs):
        steps, distances = zip(*run["distances"], strict=True)
        epochs = [step / per_epoch for step in steps]
        axes.plot(epochs, distances, color=color, lw=1, alpha=0.8, label=who if number == 0 else None)
