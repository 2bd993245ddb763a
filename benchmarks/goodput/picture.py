"""Draw goodput against the mean time between failures: measured, simulated, and simulated at scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

from goodput.contestants import GROUPS, SYNC
from goodput.simulated import DAY, HOUR, MINUTE

Row = dict[str, Any]
TICKS = {
    "1 min": MINUTE,
    "5 min": 5 * MINUTE,
    "30 min": 30 * MINUTE,
    "2 h": 2 * HOUR,
    "8 h": 8 * HOUR,
    "1 day": DAY,
}
STYLES = (":", "--", "-")


def draw(rows: Sequence[Row], path: Path) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes in (left, right):
        axes.set_xscale("log")
    _in_small(left, [row for row in rows if row["part"] == "measured" and row["failures"]])
    _at_scale(right, [row for row in rows if row["part"] == "at scale"])
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    left.set(ylim=(0, 1.05), ylabel="goodput", xlabel="seconds between failures of the job, scaled time")
    right.set_xlabel("time between failures of the job")
    figure.savefig(path, dpi=120)


def _in_small(axes: Axes, rows: Sequence[Row]) -> None:
    """Plot measured goodput as filled markers, and simulated goodput with as many failures as hollow ones."""
    for number, who in enumerate(dict.fromkeys(row["who"] for row in rows)):
        mine = sorted((row for row in rows if row["who"] == who), key=lambda row: row["seen_mtbf_s"])
        color = f"C{number}"
        axes.plot([r["seen_mtbf_s"] for r in mine], [r["goodput"] for r in mine], "o", color=color, label=who)
        told = [(row["seen_mtbf_s"], row["simulated"]) for row in mine if row["simulated"] is not None]
        if told:
            axes.plot(*zip(*told, strict=True), "D--", mfc="none", color=color, lw=1, ms=7)
    axes.plot([], [], "D--", mfc="none", color="gray", lw=1, label="simulated")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title("measured on one machine, with real kills", fontsize="medium")
    axes.legend(fontsize="small")


def _at_scale(axes: Axes, rows: Sequence[Row]) -> None:
    for style, restart in zip(STYLES, dict.fromkeys(row["restart"] for row in rows), strict=False):
        mine = [row for row in rows if row["restart"] == restart]
        for color, who in (("C0", GROUPS), ("C1", SYNC)):
            times = [row["mtbf_s"] for row in mine]
            axes.plot(times, [row[who] for row in mine], style, color=color, label=f"{who}, {restart}")
    axes.set_xticks(list(TICKS.values()), list(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axhline(0.85, color="gray", lw=0.6)
    axes.axhline(0.30, color="gray", lw=0.6)
    axes.set_title("simulated: 1,000 nodes", fontsize="medium")
    axes.legend(fontsize="small")
