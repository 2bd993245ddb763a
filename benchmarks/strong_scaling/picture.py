"""The picture of `strong_scaling.py`: speed-up over one rank, with a panel for each figure of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from hpcsgd.files.pictures import STYLE, save
from strong_scaling.places import BASELINE, DDP, FIGURES, LATE, OURS, RANKS, SYNC, TO_ALL

Row = dict[str, Any]
LOOKS = {
    DDP: ("C7", "x"), SYNC: ("C0", "o"), BASELINE: ("C1", "s"), OURS: ("C2", "^"),
    TO_ALL: ("C4", "v"), LATE: ("C3", "D"),
}  # fmt: skip
"""The color and the marker of each contestant."""
NAMES = {BASELINE: "allreduce_local_sgd"}


def draw(rows: Sequence[Row], file: Path) -> None:
    with rc_context(STYLE):
        picture = Figure(figsize=(9, 4.8), layout="constrained", dpi=120)
        _draw(picture, rows)
        save(picture, file)


def _draw(picture: Figure, rows: Sequence[Row]) -> None:
    panels: list[Axes] = list(picture.subplots(1, len(FIGURES), sharey=True))
    for axes, (name, figure) in zip(panels, FIGURES.items(), strict=True):
        axes.plot(RANKS, RANKS, color="0.6", lw=1, label="linear")
        for who, (color, marker) in LOOKS.items():
            own = [row for row in rows if row["who"] == who and row["figure"] in ("", name)]
            own = synchronous(rows, own) + own
            ranks = [row["ranks"] for row in own]
            speedups = [row["speedup"] for row in own]
            axes.plot(ranks, speedups, marker=marker, mfc="none", mew=1.5, ms=7, color=color,
                      label=NAMES.get(who, who))  # fmt: skip
            told = [row for row in own if row["predicted_speedup"]]
            axes.plot([row["ranks"] for row in told], [row["predicted_speedup"] for row in told], "--",
                      color=color, lw=1)  # fmt: skip
        axes.plot([], [], "--", color="0.3", lw=1, label="predicted by the cost model")
        axes.set(title=f"{figure.P} groups, synchronized every {figure.every} steps")
        axes.set(xlabel="ranks, two per host", xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(RANKS, map(str, RANKS))
            axis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("speed-up over one rank")
    lines, labels = panels[0].get_legend_handles_labels()
    picture.legend(lines, labels, loc="outside lower center", ncols=4, fontsize="small")


def synchronous(rows: Sequence[Row], own: Sequence[Row]) -> list[Row]:
    """Return the rows of synchronous SGD on fewer ranks than these."""
    fewest = min((row["ranks"] for row in own), default=0)
    return [row for row in rows if row["who"] == SYNC and row["ranks"] < fewest]
