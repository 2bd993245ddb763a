"""Draw a plan: the seconds of an epoch against ranks, and each method relative to synchronous training."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from math import isclose
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpcsgd.files.pictures import AMBER, BLUE, BROWN, GREEN, INDIGO, ORANGE, PINK, SKY, STYLE, save
from hpcsgd.performance.planning.estimate import Estimate

REFERENCE = "bsp"
SAME = 0.005
"""Methods whose seconds differ by at most this share, on all numbers of ranks, are drawn as one line."""
COLOURS = (BLUE, ORANGE, GREEN, PINK, AMBER, SKY, INDIGO, BROWN)
MARKERS = "os^vDP*X"
LABEL_WIDTH = 52
Line = dict[int, Estimate]
"""The fastest estimate of a method for each number of ranks."""


def draw(estimates: Sequence[Estimate], runs: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the seconds of an epoch of each method, with its fastest groups, and their ratio to `bsp`.

    The first of `estimates` is marked as recommended. `runs` are measured runs: each has `ranks` and
    `epoch_seconds`. If `bsp` was not tried, the ratio is to the recommended method.
    """
    lines = _lines(estimates)
    sets, best = _alike(lines), estimates[0]
    name = next((str(e.option) for e in estimates if e.option.name == REFERENCE), str(best.option))
    reference = lines[name]
    shared = {each: {N: e for N, e in line.items() if N in reference} for each, line in lines.items()}

    def relative(e: Estimate, seconds: float) -> float:
        return e.steps_per_epoch * seconds / reference[e.N].epoch_seconds

    with rc_context(STYLE):
        figure = Figure(figsize=(9, 4.8), dpi=120, layout="constrained")
        times, ratios = figure.subplots(1, 2)
        _draw(times, lines, sets, best, lambda e, seconds: e.steps_per_epoch * seconds)
        _draw(ratios, shared, sets, best, relative)
        for run in runs:
            times.plot(run["ranks"], run["epoch_seconds"], "kx", markersize=9, zorder=6)
        if runs:
            times.plot([], [], "kx", label="measured runs")
        times.set(title="fastest groups of each method", ylabel="seconds per epoch", yscale="log")
        ratios.set(title=f"relative to {name}", ylabel="ratio of seconds per epoch")
        ranks = sorted({e.N for e in estimates})
        for axes in (times, ratios):
            axes.set(xlabel="ranks", xscale="log")
            axes.set_xticks(ranks, [str(N) for N in ranks], rotation=45 if len(ranks) > 6 else 0)
            axes.minorticks_off()
        handles, labels = times.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small")
        save(figure, file)


def _lines(estimates: Sequence[Estimate]) -> dict[str, Line]:
    """Return the line of each option, with the fastest groups for each number of ranks."""
    found: dict[str, Line] = {}
    for e in estimates:
        line = found.setdefault(str(e.option), {})
        if e.N not in line or e.hours < line[e.N].hours:
            line[e.N] = e
    return {name: dict(sorted(line.items())) for name, line in found.items()}


def _alike(lines: Mapping[str, Line]) -> list[list[str]]:
    """Return the names of lines in sets; the lines of a set coincide with the set's first one."""
    sets: list[list[str]] = []
    for name, line in lines.items():
        for others in sets:
            first = lines[others[0]]
            if line.keys() == first.keys() and all(
                isclose(e.epoch_seconds, first[N].epoch_seconds, rel_tol=SAME) for N, e in line.items()
            ):
                others.append(name)
                break
        else:
            sets.append([name])
    return sets


def _draw(
    axes: Axes,
    lines: Mapping[str, Line],
    sets: Sequence[Sequence[str]],
    best: Estimate,
    value: Callable[[Estimate, float], float],
) -> None:
    """Draw a line per set of options; its y values are `value(estimate, seconds of a step)`.

    The interval of the recommended option is shaded.
    """
    for names, colour, marker in zip(sets, itertools.cycle(COLOURS), itertools.cycle(MARKERS)):
        line = lines[names[0]].values()
        values = [value(e, e.step.seconds) for e in line]
        kept_together = (name.replace(" ", "\N{NO-BREAK SPACE}") for name in names)
        label = textwrap.fill(", ".join(kept_together), LABEL_WIDTH)
        axes.plot([e.N for e in line], values, color=colour, marker=marker, markersize=5, label=label)
    line = lines[str(best.option)].values()
    low, high = ([value(e, getattr(e.step, end)) for e in line] for end in ("low", "high"))
    shade = {"color": "0.9", "linewidth": 0, "zorder": 0}
    axes.fill_between([e.N for e in line], low, high, label="interval of the recommended method", **shade)
    if best.N in lines[str(best.option)]:
        y = value(best, best.step.seconds)
        axes.plot(best.N, y, "k*", markersize=13, label="recommended method", zorder=5)
