"""Draw the parts of a step, with one panel per setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]
COMPUTE, EXPOSED = "#8fb3d9", "#d1605e"


def draw(rows: Sequence[Row], file: Path) -> None:
    settings = list(dict.fromkeys((row["rate"], row["model"], row["kind"]) for row in rows))
    columns = min(len(settings), 2)
    lines = -(-len(settings) // columns)
    figure = Figure(figsize=(6.5 * columns, 3.2 * lines), layout="constrained")
    panels: list[Axes] = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, setting in zip(panels, settings, strict=False):
        own = [row for row in rows if (row["rate"], row["model"], row["kind"]) == setting]
        _panel(axes, own, "{}, {} parameters, {} computing".format(*setting))
    for axes in panels[len(settings) :]:
        axes.set_axis_off()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize="small", loc="outside lower center", ncols=3)
    figure.savefig(file, format=file.suffix[1:], dpi=110)


def _panel(axes: Axes, rows: Sequence[Row], title: str) -> None:
    names = [row["who"] for row in rows]
    steps = [median(row["seconds"]) for row in rows]
    compute = [min(row["compute"], step) for row, step in zip(rows, steps, strict=True)]
    hidden = [min(row.get("hidden", 0.0), part) for row, part in zip(rows, compute, strict=True)]
    exposed = [step - part for step, part in zip(steps, compute, strict=True)]
    before = [part - some for part, some in zip(compute, hidden, strict=True)]
    axes.barh(names, before, color=COMPUTE, label="computing")
    axes.barh(names, hidden, left=before, color=COMPUTE, hatch="///", edgecolor="white", linewidth=0,
              label="computing, communication hidden behind it")  # fmt: skip
    axes.barh(names, exposed, left=compute, color=EXPOSED, label="communication, exposed")
    axes.set(title=title, xlabel="seconds per step")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25)
