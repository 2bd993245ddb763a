"""Draw a plan: the seconds of an epoch and the speed per rank against ranks, one line per method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hpcsgd.files.pictures import save
from hpcsgd.performance.planning.estimate import Estimate


def draw(estimates: Sequence[Estimate], runs: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the seconds of an epoch and the speed per rank of each method, with its fastest groups.

    The first of `estimates` is marked as recommended. `runs` are measured runs: each has `ranks` and
    `epoch_seconds`.
    """
    figure = Figure(figsize=(12, 4.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    times, worth = figure.subplots(1, 2)
    _lines(times, estimates, lambda e, seconds: e.steps_per_epoch * seconds)
    _lines(worth, estimates, lambda e, seconds: 100 * e.efficiency * e.step.seconds / seconds)
    for run in runs:
        times.plot(run["ranks"], run["epoch_seconds"], "kx", markersize=9, zorder=6)
    if runs:
        times.plot([], [], "kx", label="measured runs")
    times.set(ylabel="seconds per epoch", yscale="log")
    worth.set(ylabel="samples/s of a rank, % of one node's", ylim=(0, None))
    ranks = sorted({e.N for e in estimates})
    for axes in (times, worth):
        axes.set(xlabel="ranks", xscale="log")
        axes.set_xticks(ranks, [str(N) for N in ranks])
        axes.minorticks_off()
        axes.grid(alpha=0.25, which="both")
    times.legend(fontsize="small")
    figure.suptitle("Each method with the groups that make it fastest; shaded: what errors allow")
    save(figure, file)


def _lines(axes: Axes, estimates: Sequence[Estimate], value: Callable[[Estimate, float], float]) -> None:
    """Draw a line per option over ranks; its y values are `value(estimate, seconds of a step)`."""
    for label in dict.fromkeys(str(e.option) for e in estimates):
        line = _fastest([e for e in estimates if str(e.option) == label])
        ranks, values = [e.N for e in line], [value(e, e.step.seconds) for e in line]
        (drawn,) = axes.plot(ranks, values, "o-", markersize=4, label=label)
        low, high = ([value(e, getattr(e.step, end)) for e in line] for end in ("low", "high"))
        axes.fill_between(ranks, low, high, color=drawn.get_color(), alpha=0.08, linewidth=0)
    best = estimates[0]
    axes.plot(best.N, value(best, best.step.seconds), "k*", markersize=14, label="recommended", zorder=5)


def _fastest(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the fastest estimate for each number of ranks."""
    found: dict[int, Estimate] = {}
    for e in estimates:
        if e.N not in found or e.hours < found[e.N].hours:
            found[e.N] = e
    return [found[N] for N in sorted(found)]
