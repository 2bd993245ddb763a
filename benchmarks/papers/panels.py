"""Pictures with the axes of the papers' figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""x and y by the name of the line."""
LEGEND = 9
"""Lines at most with a legend inside."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes: ours as lines, the paper's, where it gives numbers, dotted in the same colour."""

    title: str
    xlabel: str
    ylabel: str
    ours: Series
    papers: Series | None = None
    log: str = ""
    """Axes that are logarithmic: "x", "y" or both."""


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
