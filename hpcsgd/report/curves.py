"""A picture of a run: loss, figure of merit, distance between groups, and where time and bytes went."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hpcsgd.files.pictures import BLUE, COLOURS, GREEN, GREY, ORANGE, STYLE, save
from hpcsgd.report.figures import FIGURES, found_in
from hpcsgd.report.metrics import Record
from hpcsgd.report.summary import byte_text, noted, of_kind, second_text
from hpcsgd.report.totals import Totals

PHASE_COLOURS = (*COLOURS, GREY)
Draw = Callable[[Axes, Sequence[Record]], None]
SMOOTHED_FROM = 20  # with fewer points, no smoothed curve is drawn
LOGARITHMIC_FROM = 20  # if largest / smallest exceeds this ratio, the axis is logarithmic
WIDTH = 9.0  # inches; pages and reports show pictures about 7 inches wide, so text stays readable
COLUMNS, LEGEND_COLUMNS = 2, 3
NOTE_COLUMNS = 3  # of panels of a method's metrics
AMOUNT_TEXT: dict[str, Callable[[float], str]] = {"seconds": second_text, "bytes": byte_text}


def plot_curves(records: Sequence[Record], target: Path) -> None:
    """Draw ``records`` as a PNG at ``target``; panels without data are left out.

    If there are no records, no file is written.
    """
    found = {draw: what for draw, find in CURVES.items() if (what := find(records))}
    drawn = {name for draw in found for name in DRAWN_METRICS.get(draw, ())}
    notes = [(_note, records, names) for names in _by_panel(records, drawn)]
    totals = Totals.of(records).phases
    bars = {quantity: dict(each.most_common()) for quantity, each in totals.items() if each.total()}
    rows = [
        _Row(3.2, min(COLUMNS, max(len(found), 1)), list(found.items())),
        _Row(2.4, min(NOTE_COLUMNS, max(len(notes), 1)), notes),
        _Row(1.4 + 0.6 * len(bars), 1, [(_phases, bars)] if bars else []),
    ]
    rows = [row for row in rows if row.panels]
    if not rows:
        return
    heights = [row.height * row.lines for row in rows]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights)), dpi=120, layout="constrained")
        grid = figure.add_gridspec(len(rows), 1, height_ratios=heights)
        for number, row in enumerate(rows):
            cells = grid[number].subgridspec(row.lines, row.columns)
            for i, (draw, *what) in enumerate(row.panels):
                draw(figure.add_subplot(cells[divmod(i, row.columns)]), *what)
        save(figure, target)


@dataclass(frozen=True)
class _Row:
    """A row of panels of one height, in several lines if there are more panels than `columns`."""

    height: float
    """Height of a line, in inches."""
    columns: int
    panels: Sequence[tuple[Any, ...]]
    """For each panel, the function that draws it and its arguments after the axes."""

    @property
    def lines(self) -> int:
        return -(-len(self.panels) // self.columns)


def _loss(axes: Axes, records: Sequence[Record]) -> None:
    steps, losses = _column(records, "step"), _column(records, "loss")
    if len(records) < SMOOTHED_FROM:
        axes.plot(steps, losses, color=BLUE, marker="o", markersize=4)
    else:
        axes.plot(steps, losses, color=BLUE, alpha=0.3, linewidth=1)
        axes.plot(steps, _smooth(losses, len(losses) // SMOOTHED_FROM), color=BLUE, linewidth=2)
    axes.set(title=f"training loss: {losses[-1]:.4g}", xlabel="step")
    axes.xaxis.set_major_locator(_whole_numbers())


def _gradient(axes: Axes, records: Sequence[Record]) -> None:
    steps, norms = _column(records, "step"), _column(records, "gradient_norm")
    axes.plot(steps, norms, color=BLUE, linewidth=1, marker="." if len(norms) < SMOOTHED_FROM else None)
    axes.set(title=f"norm of the gradient: median {np.median(norms):.3g}", xlabel="step")
    axes.xaxis.set_major_locator(_whole_numbers())
    if norms.min() > 0 and norms.max() > LOGARITHMIC_FROM * norms.min():
        axes.set_yscale("log")


def _speed(axes: Axes, records: Sequence[Record]) -> None:
    """Draw tokens per second; the right axis shows the fraction of the ranks' peak FLOP/s."""
    steps, speeds = _column(records, "step"), _column(records, "tokens_per_s")
    axes.plot(steps, speeds, color=BLUE, linewidth=1)
    axes.set(title=f"tokens/s: median {np.median(speeds):,.0f}", xlabel="step")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(_whole_numbers())
    if used := records[-1].get("utilization"):
        part = used / speeds[-1]  # fraction of the peak per token per second
        right = axes.secondary_yaxis("right", functions=(lambda y: y * part, lambda y: y / part))
        right.set_ylabel("part of the peak")


def _merit(axes: Axes, records: Sequence[Record]) -> None:
    """Draw the first figure of merit of the tests, and the test loss on the right axis."""
    key = found_in(records)[0]
    figure = FIGURES[key]
    epochs, values = _column(records, "epoch"), _column(records, key)
    best = figure.best(range(len(values)), key=values.__getitem__)
    axes.plot(epochs, values, color=GREEN, marker="o", markersize=4)
    axes.plot(
        epochs[best], values[best], "o", color=GREEN, markersize=11, fillstyle="none", markeredgewidth=2
    )
    title = f"test {figure.name}: best {figure.text(float(values[best]))} at epoch {epochs[best]:g}"
    axes.set(title=title, xlabel="epoch")
    axes.set_ylabel(figure.name, color=GREEN)
    axes.xaxis.set_major_locator(_whole_numbers())
    right = axes.twinx()
    right.plot(epochs, _column(records, "loss"), color=ORANGE, linestyle="--", marker="o", markersize=3)
    right.set_ylabel("loss", color=ORANGE)
    right.grid(visible=False)
    right.spines["right"].set_visible(True)


def _distance(axes: Axes, records: Sequence[Record]) -> None:
    distances = _column(records, "distance")
    axes.plot(_column(records, "step"), distances, color=ORANGE, marker=".", linewidth=0.8)
    where = "synchronizations" if records[0]["kind"] == "sync" else "evaluations"
    axes.set(title=f"distance D at {where}: median {np.median(distances):.3g}", xlabel="step")
    axes.xaxis.set_major_locator(_whole_numbers())
    if distances.min() > 0 and distances.max() > LOGARITHMIC_FROM * distances.min():
        axes.set_yscale("log")


def _distances(records: Sequence[Record]) -> list[Record]:
    """Return the records that have a distance: synchronizations, or evaluations if there are none.

    Methods whose groups never average all together have distances at evaluations only.
    """
    return of_kind(records, "sync") or [r for r in of_kind(records, "eval") if r.get("distance")]


def _counts(axes: Axes, records: Sequence[Record]) -> None:
    """Draw a histogram of each metric that the method counts, such as the staleness."""
    totals = Totals.of(records).counts
    width = 0.8 / len(totals)
    for i, (name, counts) in enumerate(totals.items()):
        numbers = sorted(counts)
        shares = np.array([counts[number] for number in numbers]) / counts.total()
        places = np.array(numbers) + (i - (len(totals) - 1) / 2) * width
        colour = PHASE_COLOURS[i % len(PHASE_COLOURS)]
        axes.bar(places, shares, width, color=colour, label=COUNTED.get(name, name))
    title = "how late and how far ahead" if totals.keys() <= COUNTED.keys() else "how often which number"
    axes.set(title=title, ylabel="share of steps")
    axes.xaxis.set_major_locator(_whole_numbers())
    axes.legend()


def _changes(axes: Axes, records: Sequence[Record]) -> None:
    """Draw the relative change Δ of the gradient for all steps but the first, which has no Δ."""
    steps, delta = _column(records, "step")[1:], _column(records, "delta")[1:]
    synced = _column(records, "synced")[1:] > 0
    for which, colour, label in ((~synced, BLUE, "local"), (synced, ORANGE, "synchronized")):
        axes.plot(steps[which], delta[which], ".", color=colour, markersize=3, label=label)
    axes.set(title=f"change of the gradient Δ: {1 - synced.mean():.1%} of steps local", xlabel="step")
    axes.xaxis.set_major_locator(_whole_numbers())
    axes.set_yscale("log")
    axes.legend()


def _sparse(axes: Axes, records: Sequence[Record]) -> None:
    steps, density = _column(records, "step"), _column(records, "density")
    axes.plot(steps, density, color=BLUE, linewidth=1)
    axes.set(title=f"density: {density.mean():.3%} sent", xlabel="step", ylim=(0, 1.1 * density.max() or 1))
    axes.set_ylabel("density", color=BLUE)
    axes.xaxis.set_major_locator(_whole_numbers())
    right = axes.twinx()
    right.plot(steps, _column(records, "error"), color=ORANGE, linewidth=1)
    right.set_ylabel("error ‖e‖", color=ORANGE)
    right.set_ylim(bottom=0)
    right.grid(visible=False)
    right.spines["right"].set_visible(True)


def _chosen(records: Sequence[Record]) -> list[Record]:
    found = noted(records, "delta", "synced")
    return found if len(found) > 1 else []


def _with(key: str, records: Sequence[Record]) -> list[Record]:
    return [record for record in of_kind(records, "step") if key in record]


COUNTED = {"staleness": "staleness: updates by others", "ahead": "steps ahead of the slowest"}
CURVES: dict[Draw, Callable[[Sequence[Record]], list[Record]]] = {
    _loss: partial(of_kind, kind="step"),
    _merit: partial(of_kind, kind="eval"),
    _distance: _distances,
    _changes: _chosen,
    _sparse: lambda records: noted(records, "density", "error"),
    _counts: partial(_with, "counts"),
    _gradient: partial(_with, "gradient_norm"),
    _speed: partial(_with, "tokens_per_s"),
}
"""For each function that draws a panel: a function that returns the records to draw."""
DRAWN_METRICS: dict[Draw, tuple[str, ...]] = {
    _changes: ("delta", "wants_sync", "synced"),
    _sparse: ("density", "error"),
}
"""For some panels of `CURVES`: the metrics of the method that the panel draws."""


def _by_panel(records: Sequence[Record], drawn: Collection[str]) -> list[list[str]]:
    """Return the names of the metrics not in `drawn`, one list per panel; all ``…_seconds`` share a panel."""
    panels: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for record in of_kind(records, "method") for name in record):
        if name not in ("kind", "step", *drawn):
            panels.setdefault("seconds" if name.endswith("_seconds") else name, []).append(name)
    return list(panels.values())


def _note(axes: Axes, records: Sequence[Record], names: Sequence[str]) -> None:
    """Draw the metrics `names` of the method, which no other panel draws, in one panel."""
    found = {name: noted(records, name) for name in names}
    values = {name: _column(those, name) for name, those in found.items()}
    for name, colour in zip(names, itertools.cycle(PHASE_COLOURS)):
        marker = "." if len(found[name]) < SMOOTHED_FROM else None
        steps = _column(found[name], "step")
        label = name.removesuffix("_seconds")
        axes.plot(steps, values[name], color=colour, linewidth=1, marker=marker, label=label)
    axes.set(title=names[0] if len(names) == 1 else "seconds of each step", xlabel="step")
    axes.xaxis.set_major_locator(_whole_numbers())
    joined = np.concatenate(list(values.values()))
    if joined.min() > 0 and joined.max() > LOGARITHMIC_FROM * joined.min():
        axes.set_yscale("log")
    if len(names) > 1:
        axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))


def _phases(axes: Axes, bars: dict[str, dict[str, float]]) -> None:
    """Draw one bar for seconds and one for bytes, divided into phases. The legend states the amounts."""
    phases = list(dict.fromkeys(phase for totals in bars.values() for phase in totals if totals[phase]))
    ends = dict.fromkeys(bars, 0.0)
    for phase, colour in zip(phases, itertools.cycle(PHASE_COLOURS)):
        shares = [totals.get(phase, 0) / sum(totals.values()) for totals in bars.values()]
        amounts = [
            AMOUNT_TEXT[quantity](totals[phase]) for quantity, totals in bars.items() if totals.get(phase)
        ]
        label = f"{phase}: {', '.join(amounts)}"
        axes.barh(list(bars), shares, left=list(ends.values()), color=colour, edgecolor="white", label=label)
        ends = {quantity: end + share for (quantity, end), share in zip(ends.items(), shares, strict=True)}
    axes.set(title="where time and bytes went", xlim=(0, 1))
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=LEGEND_COLUMNS, fontsize="small")


def _whole_numbers() -> MaxNLocator:
    return MaxNLocator(5, integer=True, min_n_ticks=1)


def _column(records: Sequence[Record], key: str) -> np.ndarray:
    return np.array([record[key] for record in records], dtype=float)


def _smooth(values: np.ndarray, reach: int) -> np.ndarray:
    """Return the mean of each value and up to ``reach`` neighbours on either side."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    index = np.arange(len(values))
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)
