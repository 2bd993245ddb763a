"""A run of islands as a picture: who was there when, how far they were, and what each had to compute with.

After EnsembleSync (papers/ensemblesync.txt), figures 4 and 5. There a worker's line is its own; here all
members have the same progress, that of the last committed round, so their lines would lie on each other. They
are drawn side by side, as those of a map of trains: the one in the middle is where the axis says. Of the
units only lines of islands that have as many are set apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from matplotlib.transforms import ScaledTranslation, Transform

from hpcsgd.errors import count_text
from hpcsgd.files.pictures import STYLE, save
from hpcsgd.islands.event_log import Event, Loss
from hpcsgd.report.curves import GREY, PHASE_COLOURS
from hpcsgd.report.summary import second_text

LIGHT = tuple(colour for colour in PHASE_COLOURS if colour != GREY)
COLOURS = LIGHT + tuple(to_hex((0.55 * r, 0.55 * g, 0.55 * b)) for r, g, b in map(to_rgb, LIGHT))
RETURNED = "returned"
MOVE: dict[str, Any] = {"color": GREY, "linestyle": "--", "linewidth": 0.6, "zorder": 1}
MARKS = {Loss.DIED: "X", Loss.SILENT: "s", Loss.LATE: "^", Loss.CUT: "D", Loss.LEFT: "v", RETURNED: "o"}
PROGRESS_HEIGHT, UNITS_HEIGHT = 4.5, 2.8  # inches
POINTS_PER_INCH = 72
APART, BAND = 2.5, 36.0  # points between two lines, and of all of them together
WIDTH = 1.6  # points, where there is room
NAMED = 16  # islands in the legend

Point = tuple[float, float]
"""Seconds, and epochs or units."""


@dataclass
class Story:
    """What there is to draw; islands and kinds in the order in which they came up."""

    lines: dict[int, list[list[Point]]] = field(default_factory=lambda: defaultdict(list))
    """Of each island, one for each time that it was a member."""
    marks: dict[str, list[tuple[int, Point]]] = field(default_factory=lambda: defaultdict(list))
    """By kind of loss or `RETURNED`: the island, and where its line ends or begins."""
    units: dict[str, list[tuple[float, Mapping[int, int]]]] = field(default_factory=lambda: defaultdict(list))
    """By unit: when it was given out, and what each island has from then on."""
    end: float = 0.0
    """Seconds."""

    @property
    def islands(self) -> list[int]:
        had = (island for steps in self.units.values() for _, units in steps for island in units)
        return sorted({*self.lines, *had})

    @property
    def moves(self) -> list[float]:
        """Seconds at which units were given out in another way than before."""
        steps = (pair for steps in self.units.values() for pair in pairwise(steps))
        return sorted({at for (_, before), (at, after) in steps if before != after})


def plot_events(events: Sequence[Event], target: Path) -> None:
    """Draw what ``events`` of an event log tell as a PNG at ``target``; panels without data are left out.

    Where no island ever averaged and no units were given out there is nothing to draw: no file is written.
    """
    story = tell(events)
    heights = [PROGRESS_HEIGHT] * bool(story.lines) + [UNITS_HEIGHT] * len(story.units)
    if not heights:
        return
    with rc_context(STYLE):
        figure = Figure(figsize=(11.0, 0.8 + sum(heights)), dpi=120, layout="constrained")
        panels = figure.subplots(
            len(heights), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )[:, 0].tolist()
        if story.lines:
            _progress(panels[0], story)
        for axes, unit in zip(panels[len(panels) - len(story.units) :], story.units, strict=True):
            _units(axes, story, unit)
        for axes in panels:
            for at in story.moves:
                axes.axvline(at, **MOVE)
        panels[-1].set_xlabel("execution time, s")
        panels[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        figure.legend(handles=_legend(story), loc="outside right upper", fontsize="small")
        save(figure, target)


def tell(events: Sequence[Event]) -> Story:
    """The lines of all islands, from who was a member when and what was committed."""
    story = Story(end=max((event["at"] for event in events), default=0.0))
    members: set[int] = set()
    lost: set[int] = set()
    epochs = 0.0
    for event in events:
        at: float = event["at"]
        here = at, epochs
        match event["event"]:
            case "generation" | "commit":
                came = set(event["members"]) - members
                under_way = bool(members)
                for island in sorted(came):
                    story.lines[island].append([here])
                    if under_way or island in lost:
                        story.marks[RETURNED].append((island, here))
                _leave(story, members - set(event["members"]), here)
                members = set(event["members"])
                if event["event"] == "commit":
                    epochs = event["epoch"] + event["fraction"]
                    for island in members:
                        story.lines[island][-1].append((at, epochs))
            case "lost":
                island = event["island"]
                if island in members:
                    _leave(story, {island}, here)
                    story.marks[event["kind"]].append((island, here))
                members.discard(island)
                lost.add(island)
            case "units":
                story.units[event["unit"]].append((at, event["units"]))
            case "finished" | "stopped":
                _leave(story, members, here)
                members.clear()
                lost.clear()
    _leave(story, members, (story.end, epochs))
    return story


def _leave(story: Story, islands: set[int], here: Point) -> None:
    """Their lines end here."""
    for island in islands:
        story.lines[island][-1].append(here)


def _progress(axes: Axes, story: Story) -> None:
    for island, lives in story.lines.items():
        for life in lives:
            _step(axes, story, island, life, _aside(axes, story, island))
    for kind, places in story.marks.items():
        for island, (at, epochs) in places:
            look = _mark(kind, _colour(story, island))
            axes.plot(at, epochs, transform=_aside(axes, story, island), **look)
    epochs = max(epochs for lives in story.lines.values() for life in lives for _, epochs in life)
    returns, left = (len(story.marks.get(kind, ())) for kind in (RETURNED, Loss.LEFT))
    losses = sum(map(len, story.marks.values())) - returns - left
    told = f"{losses} lost, {returns} returned" if losses or returns else "nobody lost"
    told += f", {left} left" if left else ""
    axes.set(
        title=f"{count_text(epochs, 'epoch')} in {second_text(story.end)}: {told}", ylabel="progress, epochs"
    )
    axes.margins(x=0.02, y=0.1)
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=epochs > 2, steps=[1, 2, 5, 10]))


def _units(axes: Axes, story: Story, unit: str) -> None:
    given = story.units[unit]
    given = [*given, (story.end, given[-1][1])]
    top = 1.2 * max((x for _, units in given for x in units.values()), default=1)
    apart = _apart(story) * top / (POINTS_PER_INCH * UNITS_HEIGHT)
    for island in story.islands:
        steps = [(at, _beside(units, island, apart)) for at, units in given]
        _step(axes, story, island, steps, axes.transData)
    totals = [sum(units.values()) for _, units in given]
    span = f"{min(totals):,}" if min(totals) == max(totals) else f"{min(totals):,} to {max(totals):,}"
    axes.set(title=f"{unit}: {span} in all", ylabel=f"{unit} of an island", ylim=(0, top))
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def _beside(units: Mapping[int, int], island: int, apart: float) -> float:
    """Its units, set apart from the lines of islands that have as many."""
    if island not in units:
        return nan
    alike = sorted(other for other, x in units.items() if x == units[island])
    return units[island] + apart * ((len(alike) - 1) / 2 - alike.index(island))


def _step(axes: Axes, story: Story, island: int, points: Sequence[Point], transform: Transform) -> None:
    axes.plot(
        *zip(*points, strict=True),
        drawstyle="steps-post",
        color=_colour(story, island),
        linewidth=min(WIDTH, 0.7 * _apart(story)),
        transform=transform,
    )
    axes.update_datalim([point for point in points if not isnan(point[1])])
    axes.autoscale_view()


def _aside(axes: Axes, story: Story, island: int) -> Transform:
    """Beside the lines of the others, that none hides another."""
    place = (len(story.islands) - 1) / 2 - story.islands.index(island)  # from top to bottom, as in the legend
    inches = place * _apart(story) / POINTS_PER_INCH
    return axes.transData + ScaledTranslation(0, inches, axes.figure.dpi_scale_trans)


def _apart(story: Story) -> float:
    """Points between two lines."""
    return min(APART, BAND / len(story.islands))


def _colour(story: Story, island: int) -> str:
    return COLOURS[story.islands.index(island) % len(COLOURS)]


def _mark(kind: str, colour: str) -> dict[str, Any]:
    """How a loss, filled, or a return, hollow, looks."""
    face, edge = ("white", colour) if kind == RETURNED else (colour, "white")
    return {
        "marker": MARKS[kind],
        "markersize": 8,
        "markerfacecolor": face,
        "markeredgecolor": edge,
        "linestyle": "none",
        "zorder": 3,
    }


def _legend(story: Story) -> list[Line2D]:
    islands = story.islands
    lines = [Line2D([], [], color=_colour(story, i), linewidth=WIDTH, label=f"island {i}") for i in islands]
    if len(islands) > NAMED:
        lines[NAMED:] = [Line2D([], [], linestyle="none", label=f"and {len(islands) - NAMED} more")]
    marks = [Line2D([], [], label=kind, **_mark(kind, "black")) for kind in MARKS if kind in story.marks]
    moves = [Line2D([], [], label="units moved", **MOVE)] if story.moves else []
    return lines + marks + moves
