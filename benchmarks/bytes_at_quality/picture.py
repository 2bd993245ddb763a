"""The picture of `bytes_at_quality.py`: quality against the bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bytes_at_quality.contestants import CONTESTANTS
from bytes_at_quality.judging import finals
from hpcsgd.files.pictures import STYLE, save

Row = dict[str, Any]
MARKERS = "os^vDP*Xph<"
"""An open marker for each contestant, because some send as many bytes as another and are as good."""


def draw(path: Path, rows: Sequence[Row]) -> None:
    shapes = sorted({row["groups"] for row in rows})
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.5 * len(shapes), 4.6), layout="constrained", dpi=120)
        for groups, axes in zip(
            shapes, figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0], strict=True
        ):
            _panel(axes, rows, groups)
        lines, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", ncols=min(len(labels), 2 * len(shapes)))
        save(figure, path)


def _panel(axes: Axes, rows: Sequence[Row], groups: int) -> None:
    for place, (who, marker) in enumerate(zip(CONTESTANTS, MARKERS, strict=True)):
        mine = finals(rows, who, groups).values()
        if mine:
            bits = [row["test_loss"] / log(2) for row in mine]
            sent = [row["bytes"] / 1e6 for row in mine]
            axes.plot(
                sent,
                bits,
                marker,
                color=f"C{place}",
                fillstyle="none",
                mew=1.6,
                ms=8,
                label=who.replace("streamed", "streaming"),
            )
    axes.set(xscale="log", title=f"{groups} groups", xlabel="megabytes that a rank sent")
    if axes.get_subplotspec().is_first_col():  # pyright: ignore[reportOptionalMemberAccess]
        axes.set_ylabel("bits per byte of the test split")
