"""The picture of `time_to_quality.py`: scores against seconds and against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpcsgd.files.pictures import STYLE, save
from time_to_quality.contestants import CONTESTANTS, DDP, PEERS
from time_to_quality.judging import UNSHAPED, finals, target
from time_to_quality.tasks import Task

Row = dict[str, Any]
TITLES = {"100mbit": "4 hosts, 100 Mbit/s", "1gbit": "4 hosts, 1 Gbit/s", UNSHAPED: "one host"}
GREYS = ("#000000", "#777777", "#777777", "#999999", "#b5b5b5", "#b5b5b5")
DASHES = ("-", "--", ":", "-.", "--", ":")


def draw(path: Path, rows: Sequence[Row], known: Mapping[str, Task]) -> None:
    """Draw a row of panels per task: one panel per rate, and one of scores against bytes.

    The dotted line is the score to reach, at which DDP ends.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    rates = [
        rate for rate in TITLES if any(finals(rows, task, rate, who) for task in tasks for who in CONTESTANTS)
    ]
    with mpl.rc_context(STYLE):
        columns = len(rates) + 1
        figure = Figure(figsize=(4.2 * columns, 3.6 * len(tasks)), layout="constrained", dpi=120)
        grid = figure.subplots(len(tasks), columns, squeeze=False, sharey="row")
        for task, panels in zip(tasks, grid, strict=True):
            for rate, axes in zip(rates, panels, strict=False):
                _panel(axes, rows, task, rate, "seconds")
                axes.set(title=f"{known[task].title}, {TITLES[rate]}", xlabel="seconds")
            linked = next((rate for rate in rates if rate != UNSHAPED), UNSHAPED)
            _panel(panels[-1], rows, task, linked, "megabytes")
            panels[-1].set(title=f"{known[task].title}, bytes", xlabel="megabytes sent per host")
            panels[0].set_ylabel(f"{known[task].unit} of the test data")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2 * columns)
        save(figure, path)


def _panel(axes: Axes, rows: Sequence[Row], task: str, rate: str, against: str) -> None:
    colours = iter(f"C{i}" for i in range(10))
    for place, who in enumerate(CONTESTANTS):
        peer = who in PEERS
        colour, dash = (GREYS[place], DASHES[place]) if peer else (next(colours), "-")
        if mine := list(finals(rows, task, rate, who).values()):
            x, y = ([fmean(at) for at in zip(*(row[key] for row in mine), strict=True)]
                    for key in (against, "scores"))  # fmt: skip
            axes.plot(x, y, dash, color=colour, label=who, lw=2 if who == DDP or not peer else 1.2)
            axes.plot(x[-1:], y[-1:], "o", color=colour, ms=4)
    if (score := target(rows, task, rate)) is not None:
        axes.axhline(score, color=GREYS[0], lw=0.8, ls=":")
    if against == "megabytes":
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
