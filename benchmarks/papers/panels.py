"""Pictures with the axes of the papers' figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpcsgd.files.pictures import STYLE, save

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""The x and y values of each line, by the line's name."""
WIDE = 20
"""If a name has more characters than this, the legend has one column."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes. Our lines are solid.

    If the paper gives numbers, its lines are dotted, and have the color of our line of the same name.
    """

    title: str
    xlabel: str
    ylabel: str
    ours: Series
    papers: Series | None = None
    log: str = ""
    """The logarithmic axes: "x", "y" or "xy"; empty if there are none."""


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Draw the panels, two in a row. If all have lines of the same names, they share one legend."""
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(4.5 * columns, 3.4 * rows), dpi=120, layout="constrained")
        for place, panel in enumerate(panels, 1):
            _fill(figure.add_subplot(rows, columns, place), panel)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        if len(panels) > 1 and all(axes.get_legend_handles_labels()[1] == labels for axes in figure.axes):
            figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
        else:
            for axes in figure.axes:
                _legend(axes)
        save(figure, path)


def _fill(axes: Axes, panel: Panel) -> None:
    colours = {name: f"C{i % 10}" for i, name in enumerate([*panel.ours, *(panel.papers or {})])}
    for name, (x, y) in panel.ours.items():
        axes.plot(x, y, "o-", ms=3, color=colours[name], label=name)
    for name, (x, y) in (panel.papers or {}).items():
        axes.plot(x, y, "s:", ms=4, mfc="none", color=colours[name], label=f"{name}, the paper")
    for axis in panel.log:
        axes.set(**{f"{axis}scale": "log"})
    axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)


def _legend(axes: Axes) -> None:
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        columns = 1 if max(map(len, labels)) > WIDE else 2
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns)
