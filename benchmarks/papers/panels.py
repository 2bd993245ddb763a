"""Pictures with the axes of the papers' figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""The x and y values of each line, by the line's name."""
LEGEND = 9
"""With more lines than this, the legend has a smaller font and two columns."""


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
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _fill(axes, panel)
    figure.savefig(path, dpi=110)


def _fill(axes: Axes, panel: Panel) -> None:
    colours = {name: f"C{i % 10}" for i, name in enumerate([*panel.ours, *(panel.papers or {})])}
    for name, (x, y) in panel.ours.items():
        axes.plot(x, y, "o-", ms=3, color=colours[name], label=name)
    for name, (x, y) in (panel.papers or {}).items():
        axes.plot(x, y, "s:", ms=4, mfc="none", color=colours[name], label=f"{name}, the paper")
    for axis in panel.log:
        axes.set(**{f"{axis}scale": "log"})
    axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    axes.grid(alpha=0.25)
    if any(panel.ours):
        many = len(axes.lines) > LEGEND
        axes.legend(fontsize="x-small" if many else "small", ncols=2 if many else 1)
