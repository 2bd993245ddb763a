"""A picture of a comparison: the variants' results against steps, seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from hpcsgd.files.pictures import COLOURS, GREY, STYLE, save
from hpcsgd.report.comparison import Comparison, Point
from hpcsgd.report.curves import LOGARITHMIC_FROM

LINES = ("-", "--", ":")
"""Line styles of variants. All colours are used with one style before the next style."""
PANELS = {"steps": "steps", "seconds": "seconds of training", "bytes": "bytes sent by a rank"}
"""Axis labels of the panels, by the quantity on the axis."""


def plot_comparison(comparison: Comparison, target: Path) -> None:
    """Draw a PNG at `target`: the figure of merit against steps, seconds, and bytes (logarithmic).

    If nothing was evaluated, no file is written. If nothing was sent, there is no panel for bytes.
    """
    courses = {entry.label: comparison.course(entry) for entry in comparison.entries}
    points = [point for course in courses.values() for point in course]
    spent = [name for name in PANELS if any(getattr(point, name) > 0 for point in points)]
    if not spent:
        return
    values = [point.value for point in points]
    with rc_context(STYLE):
        figure = Figure(figsize=(max(4.5, 3.0 * len(spent)), 4.2), dpi=120, layout="constrained")
        panels: list[Axes] = figure.subplots(1, len(spent), sharey=True, squeeze=False)[0].tolist()
        for axes, name in zip(panels, spent, strict=True):
            _panel(axes, name, courses, comparison)
        panels[0].set_ylabel(f"test {comparison.figure.name}")
        if 0 < LOGARITHMIC_FROM * min(values) < max(values):
            panels[0].set_yscale("log")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(len(labels), 4), fontsize="small"
        )
        save(figure, target)


def _panel(axes: Axes, name: str, courses: Mapping[str, Sequence[Point]], comparison: Comparison) -> None:
    styles = ((colour, line) for line in cycle(LINES) for colour in COLOURS)
    for entry, (colour, line) in zip(comparison.entries, styles, strict=False):
        course = [point for point in courses[entry.label] if getattr(point, name) > 0]
        spent = [getattr(point, name) for point in course]
        values = [point.value for point in course]
        axes.plot(spent, values, line, color=colour, marker="o", markersize=3, label=entry.label)
        there = comparison.reached(entry)
        if there is not None and there in course:
            axes.plot(
                getattr(there, name), there.value, "o", color=colour, markersize=10, fillstyle="none",
                markeredgewidth=2,
            )  # fmt: skip
    if comparison.target is not None:
        axes.axhline(comparison.target, color=GREY, linestyle="--", linewidth=1, zorder=1)
    axes.set(title=f"test {comparison.figure.name} by {name}", xlabel=PANELS[name])
    if name == "bytes":
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
        axes.xaxis.set_minor_formatter(NullFormatter())
