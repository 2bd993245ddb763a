"""Draw a simulated run: the parts of a step, the spread of the groups, the goodput of checkpointing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from hpcsgd.files.pictures import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    INDIGO,
    ORANGE,
    PINK,
    SKY,
    STYLE,
    TEAL,
    save,
)
from hpcsgd.performance.simulation.compute import Seconds
from hpcsgd.performance.simulation.failures import Checkpointing
from hpcsgd.performance.simulation.rank_times import CAUSES, WAITING, RankTimes
from hpcsgd.performance.simulation.simulate import Simulated

WORK = (BLUE, SKY, INDIGO, TEAL, GREEN, "#B5D7EC")
WAITS = (AMBER, ORANGE, PINK, "#8C1C13")
COLOURS = dict(zip([c for c in CAUSES if c not in WAITING], WORK, strict=True)) | dict(
    zip(WAITING, WAITS, strict=True)
)
POINTS = 40
"""The approximate number of points along the time axis."""
PIECE = 48
"""A point is a mean over a multiple of 48 steps, so that most points cover equally many synchronizations."""


def draw(simulated: Simulated, target: Path) -> None:
    """Draw the run into the PNG file `target`."""
    saving = simulated.checkpointing
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 7.2), dpi=120, layout="constrained")
        grid = figure.add_gridspec(2, 2 if saving else 1)
        _seconds(figure.add_subplot(grid[0, :]), simulated.stats, simulated.of.layout.P)
        _apart(figure.add_subplot(grid[1, 0]), simulated.stats)
        if saving:
            _saving(figure.add_subplot(grid[1, 1]), saving)
        save(figure, target)


def _seconds(axes: Axes, stats: RankTimes, P: int) -> None:
    """Draw the seconds of a step by cause, over time, with waiting on top of work."""
    order = [cause for cause in sorted(COLOURS, key=WAITING.__contains__) if stats.seconds[cause].any()]
    time = _averaged(stats.mean)
    layers = [_averaged(stats.seconds[cause]) / P for cause in order]
    labels = [f"waiting {c}" if c.startswith(("in ", "for ")) else c for c in order]
    axes.stackplot(time, layers, labels=labels, colors=[COLOURS[cause] for cause in order], step="mid")
    axes.set(title="a step, mean over groups", ylim=(0, None))
    axes.set(xlabel="seconds since the start", ylabel="seconds per step")
    axes.margins(x=0)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4)


def _apart(axes: Axes, stats: RankTimes) -> None:
    """Draw, over time, how many steps the first and the last group are ahead of the groups' mean."""
    steps = np.arange(1, len(stats.mean) + 1)
    time = stats.mean
    for name, ends, colour in (
        ("first group", stats.first, BLUE),
        ("last group", stats.last, ORANGE),
    ):
        done = np.maximum.accumulate(ends)  # a late group may end a step after the others' next ones
        axes.plot(_averaged(time), _averaged(np.interp(time, done, steps) - steps), color=colour, label=name)
    axes.axhline(0, color=GREY, linewidth=1)
    axes.set(title="first and last group", xlabel="seconds since the start", ylabel="steps ahead of the mean")
    axes.margins(x=0)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def _saving(axes: Axes, saving: Checkpointing) -> None:
    axes.plot(saving.tried_seconds, saving.tried_goodput, color=BLUE, label="simulated")
    marks = (("Young", saving.young_seconds, GREEN), ("Daly", saving.daly_seconds, AMBER))
    for name, seconds, colour in marks:
        axes.axvline(seconds, color=colour, linestyle="--", label=f"{name}: {seconds:,.0f} s")
    axes.plot(
        saving.best_seconds,
        saving.best_goodput,
        "o",
        color=ORANGE,
        label=f"best: {saving.best_seconds:,.0f} s",
    )
    axes.set(title="by checkpoint interval", xlabel="seconds of work between checkpoints", xscale="log")
    axes.set_ylabel("goodput")
    ticks = [float(f"{saving.young_seconds * 2.0**power:.2g}") for power in range(-2, 3)]
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def _averaged(values: Seconds) -> Seconds:
    """Return means over consecutive `values`, about `POINTS` of them, so that the picture stays readable."""
    length = PIECE * math.ceil(len(values) / POINTS / PIECE) if len(values) >= POINTS * PIECE // 4 else 1
    pieces = np.array_split(values, max(len(values) // length, 1))
    return np.array([piece.mean() for piece in pieces])
