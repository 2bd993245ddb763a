"""Draw goodput against the mean time between failures: measured, simulated, and simulated at scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

from goodput.contestants import GROUPS, SYNC
from goodput.simulated import DAY, HOUR, MINUTE
from hpcsgd.files.pictures import STYLE, save

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
COLORS = {"C0": GROUPS, "C1": SYNC}


def draw(rows: Sequence[Row], path: Path) -> None:
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 5), layout="constrained", dpi=120)
        _draw(figure, rows)
        save(figure, path)


def _draw(figure: Figure, rows: Sequence[Row]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    for axes in (left, right):
        axes.set_xscale("log")
    _in_small(left, [row for row in rows if row["part"] == "measured" and row["failures"]])
    _at_scale(right, [row for row in rows if row["part"] == "at scale"])
    for axes in (left, right):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    left.set(ylim=(0, 1.05), ylabel="goodput", xlabel="seconds between failures of the job")
    right.set_xlabel("time between failures of the job")


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
    axes.set_title("measured, with real kills")


def _at_scale(axes: Axes, rows: Sequence[Row]) -> None:
    for style, restart in zip(STYLES, dict.fromkeys(row["restart"] for row in rows), strict=False):
        mine = [row for row in rows if row["restart"] == restart]
        for color, who in COLORS.items():
            times = [row["mtbf_s"] for row in mine]
            axes.plot(times, [row[who] for row in mine], style, color=color)
        axes.plot([], [], style, color="0.3", label=restart)
    axes.set_xticks(list(TICKS.values()), list(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    for color, who in COLORS.items():
        axes.plot([], [], "s", color=color, label=who)
    axes.set_title("simulated: 1,000 nodes")
