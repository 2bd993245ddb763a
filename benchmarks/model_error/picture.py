"""The picture of `model_error.py`: measured against predicted seconds per step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from model_error.cells import METHODS


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    figure = Figure(figsize=(7, 6.5), layout="constrained")
    axes = figure.subplots()
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
        axes.plot([], [], marker, color="0.3", label=rate)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured seconds a step", ylabel="predicted, from measurements of four ranks")
    axes.legend(fontsize="small", loc="upper left")
    axes.grid(alpha=0.25, which="both")
    figure.savefig(file, format=file.suffix[1:], dpi=110)
