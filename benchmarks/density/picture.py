"""The picture of `density.py`: for each task the densities over the steps, and below them the errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from density.tasks import TASKS
from density.training import CONTESTANTS, DENSE

Row = dict[str, Any]
COLORS = {who: f"C{i}" for i, who in enumerate(who for who in CONTESTANTS if who != DENSE)}


def draw(path: Path, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(max(7, 4 * len(names)), 6.4), layout="constrained")
    grid = figure.subplots(2, len(names), sharex="col", squeeze=False)
    for name, (above, below) in zip(names, grid.T, strict=True):
        task = TASKS[name]
        for row in rows:
            if row["task"] == name and row["who"] != DENSE:
                _curve(above, row, "densities")
                _curve(below, row, "errors")
        above.axhline(task.density, color="black", ls="--", lw=1, label="set density")
        above.axhline(task.paper * task.density, color="gray", ls=":", lw=1, label="Top-k in the paper")
        above.set(title=f"{task.title}, d = {task.density:g}")
        below.set(xlabel="steps")
        for axes in (above, below):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.grid(alpha=0.3)
    grid[0, 0].set_ylabel("actual density")
    grid[1, 0].set_ylabel("‖e‖, mean over the workers")
    lines, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=min(len(labels), 2 + 2 * len(names)))
    figure.savefig(path, dpi=120)


def _curve(axes: Axes, row: Row, key: str) -> None:
    """Plot a curve whose points are means of equally many steps, except for the last."""
    width = -(-row["steps"] // len(row[key]))
    steps = [min(row["steps"], i * width + width / 2) for i in range(len(row[key]))]
    axes.plot(steps, row[key], color=COLORS[row["who"]], lw=1.4, label=row["who"])
