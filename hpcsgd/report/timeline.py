"""A picture of a few traced steps: when the training thread computed and waited, and the messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hpcsgd.comm.events import MESSAGE, SPAN, WAIT
from hpcsgd.files.pictures import STYLE, save
from hpcsgd.report.curves import PHASE_COLOURS
from hpcsgd.report.trace import SYNCS, TRAINING, Line, read

RANKS, STEPS = 4, 3
"""Maximum numbers of ranks and steps that are drawn."""
LANE, GAP = 0.8, 0.35
COMPUTING: Mapping[str, str] = {
    "data": "#f0e442",
    "forward": "#d9d9d9",
    "backward": "#bdbdbd",
    "update": "#969696",
    "eval": "#e8e1d4",
    "checkpoint": "#d8c8a8",
}
WAITING = "#b2182b"
Row = tuple[int, int]
"""A row of the picture: the numbers of its rank and thread."""


def plot_timeline(trace: Path, target: Path) -> None:
    """Draw a few steps of the trace in the file `trace` as a PNG at `target`, if there are any."""
    found = [line for line in read(trace, '"ph": "X"') if line["pid"] < RANKS]
    extent = _extent(found)
    if extent is None:
        return
    drawn = [line for line in found if line["ts"] < extent[1] - 1 and line["ts"] + line["dur"] > extent[0]]
    rows = sorted({(line["pid"], line["tid"]) for line in drawn if line["tid"] != SYNCS})
    with rc_context(STYLE):
        height = 1.6 + 0.42 * len(rows)
        figure = Figure(figsize=(9, height), dpi=120, layout="constrained")
        _draw(figure, drawn, rows, extent)
        save(figure, target)


def _extent(found: Sequence[Line]) -> tuple[float, float] | None:
    """Return begin and end, in microseconds, of the steps to draw, or None if no step was traced.

    `STEPS` steps are drawn, up to the last step with a synchronization, or else up to the last step.
    """
    steps = [line for line in found if line["pid"] == 0 and line["name"].startswith("step ")]
    if not steps:
        return None
    synced = {line["args"]["step"] for line in found if line["name"] == "sync"}
    last = max((i for i, line in enumerate(steps) if _number(line) in synced), default=len(steps) - 1)
    few = [
        line
        for line in steps[max(last - STEPS + 1, 0) : last + 1]
        if _number(line) > _number(steps[last]) - STEPS
    ]
    return few[0]["ts"], few[-1]["ts"] + few[-1]["dur"]


def _number(step: Line) -> int:
    return int(step["name"].split()[1])


def _draw(figure: Figure, drawn: Sequence[Line], rows: Sequence[Row], extent: tuple[float, float]) -> None:
    axes = figure.subplots()
    heights = dict(_places(rows))
    phases = list(dict.fromkeys(line["args"]["phase"] for line in drawn if line["cat"] == MESSAGE))
    colours = {name: PHASE_COLOURS[i % len(PHASE_COLOURS)] for i, name in enumerate(phases)}
    for line in drawn:
        row = line["pid"], line["tid"]
        if row not in heights:
            continue
        start = max(line["ts"], extent[0])
        bar = [((start - extent[0]) / 1e3, (min(line["ts"] + line["dur"], extent[1]) - start) / 1e3)]
        low = heights[row]
        if line["cat"] == SPAN and line["name"] in COMPUTING:
            axes.broken_barh(bar, (low, LANE), color=COMPUTING[line["name"]], linewidth=0)
        elif line["cat"] == WAIT and line["tid"] == TRAINING:
            axes.broken_barh(bar, (low, LANE / 2), color=WAITING, linewidth=0, zorder=3)
        elif line["cat"] == MESSAGE:
            colour = colours[line["args"]["phase"]]
            axes.broken_barh(bar, (low, LANE), facecolor=colour, edgecolor="white", linewidth=0.3)
    for line in drawn:
        if line["pid"] == 0 and line["name"].startswith("step "):
            axes.axvline((line["ts"] - extent[0]) / 1e3, color="0.3", linewidth=0.8, linestyle=":")
            top = heights[rows[0]] + LANE + 0.15
            axes.text((line["ts"] - extent[0]) / 1e3, top, f" {line['name']}", fontsize=9, color="0.3")
    axes.set_yticks([heights[row] + LANE / 2 for row in rows], [_name(row) for row in rows], fontsize=9)
    axes.set(xlabel="milliseconds", xlim=(0, (extent[1] - extent[0]) / 1e3))
    axes.grid(visible=False, axis="y")
    spans = {line["name"] for line in drawn if line["cat"] == SPAN}
    legend = [Patch(color=colour, label=name) for name, colour in COMPUTING.items() if name in spans]
    legend.append(Patch(color=WAITING, label="waiting"))
    legend += [Patch(color=colour, label=f"{name} (messages)") for name, colour in colours.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=9)


def _places(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Yield each row with its vertical position, from top to bottom, with gaps between ranks."""
    low = 0.0
    for i, row in enumerate(rows):
        low -= 1 + (GAP if i and rows[i - 1][0] != row[0] else 0)
        yield row, low


def _name(row: Row) -> str:
    rank, thread = row
    return f"rank {rank}" if thread == TRAINING else f"thread {thread}"
