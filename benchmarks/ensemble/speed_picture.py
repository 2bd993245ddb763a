"""Draw the picture of `speed.py`: accuracy against time, and the model distances at synchronizations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from hpcsgd.files.pictures import STYLE, save

Row = dict[str, Any]
NAMES = {
    "sync SGD": "bsp",
    "async SGD": "async_sgd",
    "EnsembleSync": "ensemble_sync",
    "with natural gradient": "ensemble_sync with natural gradient",
}
"""Our methods' names for the contestants."""


def draw(path: Path, rows: Sequence[Row], trained: Sequence[Row]) -> None:
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 4.4), layout="constrained", dpi=120)
        _draw(figure, rows, trained)
        save(figure, path)


def _draw(figure: Figure, rows: Sequence[Row], trained: Sequence[Row]) -> None:
    left, right = figure.subplots(1, 2)
    for number, who in enumerate(dict.fromkeys(run["who"] for run in trained)):
        runs = [run for run in trained if run["who"] == who]
        timed = next(row for row in rows if row["who"] == who)
        per_epoch = timed["seconds_a_step"]["median"] * timed["steps_an_epoch"]
        _accuracy(left, f"C{number}", who, runs, per_epoch)
        if runs[0]["distances"]:
            _distances(right, f"C{number}", runs, timed["steps_an_epoch"])
    left.set(title="after each epoch", ylabel="test accuracy, %")
    left.set_xlabel("minutes: steps × seconds per step")
    left.set_xscale("log")
    left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.xaxis.set_major_formatter("{x:g}")
    left.xaxis.set_minor_formatter(NullFormatter())
    right.set(title="at synchronizations", xlabel="epoch")
    right.set_ylabel("distance of a group from the mean")
    right.set_ylim(bottom=0)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")


def _accuracy(axes: Axes, color: str, who: str, runs: Sequence[Row], per_epoch: float) -> None:
    """Plot the mean over the seeds as a thick line and each seed as a thin one."""
    minutes = [(epoch + 1) * per_epoch / 60 for epoch in range(len(runs[0]["accuracy"]))]
    for run in runs:
        axes.plot(minutes, [100 * a for a in run["accuracy"]], color=color, lw=0.6, alpha=0.5)
    means = [100 * mean(values) for values in zip(*(run["accuracy"] for run in runs), strict=True)]
    axes.plot(minutes, means, "o-", color=color, ms=5, label=NAMES.get(who, who))


def _distances(axes: Axes, color: str, runs: Sequence[Row], per_epoch: int) -> None:
    for run in runs:
        steps, distances = zip(*run["distances"], strict=True)
        epochs = [step / per_epoch for step in steps]
        axes.plot(epochs, distances, color=color, lw=1.5)
