"""The picture of `density.py`: for each task the densities over the steps, and below them the errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from density.tasks import TASKS
from density.training import CLT_K, CONTESTANTS, DENSE
from hpcsgd.files.pictures import STYLE, save

Row = dict[str, Any]
WIDTH, HEIGHT = 9, 6.4
COLORS = {who: f"C{i}" for i, who in enumerate(who for who in CONTESTANTS if who != DENSE)}


def draw(path: Path, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(row["task"] for row in rows))
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained", dpi=120)
        _draw(figure, names, rows)
        save(figure, path)


def _draw(figure: Figure, names: Sequence[str], rows: Sequence[Row]) -> None:
    grid = figure.subplots(2, len(names), sharex="col", squeeze=False)
    for name, (above, below) in zip(names, grid.T, strict=True):
        task = TASKS[name]
        for row in rows:
            if row["task"] == name and row["who"] != DENSE:
                _curve(above, row, "densities")
                _curve(below, row, "errors")
        above.axhline(task.density, color="black", ls=(0, (4, 6)), lw=1, zorder=3, label="set density")
        above.axhline(task.paper * task.density, color="gray", ls=":", lw=1, label="Top-k in the paper")
        above.set(title=f"{task.title}, d = {task.density:g}")
        below.set(xlabel="steps")
        for axes in (above, below):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
    grid[0, 0].set_ylabel("actual density")
    grid[1, 0].set_ylabel("error ‖e‖, mean over workers")
    lines, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=5, fontsize="small")


def _curve(axes: Axes, row: Row, key: str) -> None:
    """Plot a curve whose points are means of equally many steps, except for the last."""
    width = -(-row["steps"] // len(row[key]))
    steps = [min(row["steps"], i * width + width / 2) for i in range(len(row[key]))]
    lw, zorder = (4, 1.9) if row["who"] == CLT_K else (1.4, 2)  # others lie on CLT-k's line and would hide it
    axes.plot(steps, row[key], color=COLORS[row["who"]], lw=lw, zorder=zorder, label=row["who"])
