"""The picture of `model_error.py`: measured against predicted seconds per step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from hpcsgd.files.pictures import STYLE, save
from model_error.cells import METHODS

TICKS = (0.1, 0.2, 0.5, 1, 2, 5)


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 4.6), layout="constrained", dpi=120)
        _draw(figure.subplots(), rows)
        save(figure, file)


def _draw(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    ends = [min(row["measured"] for row in rows) * 0.7, max(row["measured"] for row in rows) * 1.4]
    axes.plot(ends, ends, color="0.4", linewidth=1)
    axes.fill_between(ends, [e * 0.75 for e in ends], [e * 1.25 for e in ends], color="0.93", label="± 25 %")
    markers = dict(zip(dict.fromkeys(row["rate"] for row in rows), "o^sv", strict=False))
    colours = {method: f"C{i}" for i, method in enumerate(METHODS)}
    for row in rows:
        error = [[row["predicted"] - row["low"]], [row["high"] - row["predicted"]]]
        axes.errorbar(
            row["measured"], row["predicted"], error, fmt=markers[row["rate"]], color=colours[row["method"]],
            markersize=5, elinewidth=0.6, alpha=0.8,
        )  # fmt: skip
    for method, colour in colours.items():
        axes.plot([], [], "o", color=colour, label=method)
    for rate, marker in markers.items():
        shown = rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")
        axes.plot([], [], marker, color="0.3", label=f"links of {shown}")
    axes.set(xscale="log", yscale="log", xlabel="measured seconds per step")
    axes.set(ylabel="predicted seconds per step", title="eight ranks, predicted from measurements of four")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(TICKS, map(str, TICKS))
        axis.set_minor_locator(NullLocator())
    axes.set(xlim=ends, ylim=ends)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
