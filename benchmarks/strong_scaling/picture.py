"""The picture of `strong_scaling.py`: speed-up over one rank, with a panel for each figure of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from strong_scaling.places import BASELINE, DDP, FIGURES, LATE, OURS, RANKS, SYNC, TO_ALL

Row = dict[str, Any]
COLORS = {DDP: "C7", SYNC: "C0", BASELINE: "C1", OURS: "C2", TO_ALL: "C4", LATE: "C3"}


def draw(rows: Sequence[Row], file: Path) -> None:
    picture = Figure(figsize=(11, 4.6), layout="constrained")
    panels: list[Axes] = list(picture.subplots(1, len(FIGURES), sharey=True))
    for axes, (name, figure) in zip(panels, FIGURES.items(), strict=True):
        axes.plot(RANKS, RANKS, color="0.8", lw=1, label="linear")
        for who, color in COLORS.items():
            own = [row for row in rows if row["who"] == who and row["figure"] in ("", name)]
            own = synchronous(rows, own) + own
            ranks = [row["ranks"] for row in own]
            axes.plot(ranks, [row["speedup"] for row in own], "o-", color=color, ms=5, label=who)
            told = [row for row in own if row["predicted_speedup"]]
            label = "predicted by the cost model" if who == SYNC else None
            axes.plot([row["ranks"] for row in told], [row["predicted_speedup"] for row in told], "--",
                      color=color, lw=1, label=label)  # fmt: skip
        axes.set(title=f"as {name}: {figure.P} groups, synchronized every {figure.every} steps")
        axes.set(xlabel="ranks, two a host", xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(RANKS, map(str, RANKS))
            axis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("speed-up over one rank")
    lines, labels = panels[0].get_legend_handles_labels()
    picture.legend(lines, labels, loc="outside lower center", ncols=4, fontsize="small")
    picture.savefig(file, format=file.suffix[1:], dpi=110)


def synchronous(rows: Sequence[Row], own: Sequence[Row]) -> list[Row]:
    """Return the rows of synchronous SGD on fewer ranks than these."""
    fewest = min((row["ranks"] for row in own), default=0)
    return [row for row in rows if row["who"] == SYNC and row["ranks"] < fewest]
