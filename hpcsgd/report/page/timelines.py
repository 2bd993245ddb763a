"""Plots over time: starts of a requeued job; members, progress and resources of replica groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from hpcsgd.errors import count_text
from hpcsgd.report.page.bars import Plot, Trace, plain
from hpcsgd.report.page.runs import Run
from hpcsgd.report.replica_groups import Timeline, tell
from hpcsgd.report.summary import second_text

MARKS = {
    "died": "x", "silent": "square", "late": "triangle-up", "cut": "diamond", "left": "triangle-down",
    "returned": "circle",
}  # fmt: skip
SECONDS = "seconds since the start"


def restarts(runs: Sequence[Run]) -> Iterator[Plot]:
    """Yield a plot of steps by time of day with a line per start, if runs were started more than once."""
    traces: list[Trace] = []
    for i, run in enumerate(runs):
        if len(run.timeline.attempts) < 2:
            continue
        for number, attempt in enumerate(run.timeline.attempts, start=1):
            points = attempt.course.points() or [(attempt.started.timestamp(), attempt.first_step)]
            name = f"start {number}" if len(runs) == 1 else f"{run.label}, start {number}"
            look = {"mode": "lines+markers", "colour": number - 1 if len(runs) == 1 else i, "run": i}
            place = {"x": [_clock(at) for at, _ in points], "y": [step for _, step in points]}
            traces.append({"type": "scatter", "name": plain(name), **look, **place})
    if traces:
        layout = {"yaxis": {"title": "step"}, "xaxis": {"title": "UTC"}}
        yield Plot("steps by time of day: the starts of a requeued job", traces, wide=True, layout=layout)


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3]


def replica_groups(runs: Sequence[Run]) -> Iterator[Plot]:
    """Yield plots about replica groups: when they averaged, their progress, and their resources."""
    for run in runs:
        timeline = tell(run.events)
        of = "" if len(runs) == 1 else f"{run.label}: "
        if timeline.lines:
            yield _members(timeline, of)
            yield _progress(timeline, of)
        yield from (_units(timeline, unit, of) for unit in timeline.units)


def _members(timeline: Timeline, of: str) -> Plot:
    """Return a plot with a line for each group while it was a member, and marks for lost groups."""
    traces: list[Trace] = []
    for replica_group, lines in timeline.lines.items():
        x: list[float | None] = []
        for line in lines:
            x += [line[0][0], line[-1][0], None]
        y = [None if at is None else replica_group for at in x]
        look = {"mode": "lines", "width": 6, "colour": replica_group, "hoverinfo": "x+name"}
        traces.append({"type": "scatter", "name": f"replica group {replica_group}", "x": x, "y": y, **look})
    for kind, marks in timeline.marks.items():
        traces.append(
            _marks(kind, [at for _, (at, _) in marks], [replica_group for replica_group, _ in marks])
        )
    layout = {"yaxis": {"title": "replica group", "dtick": 1}, "xaxis": {"title": SECONDS}}
    return Plot(f"{of}members: which replica groups averaged when", traces, wide=True, layout=layout)


def _progress(timeline: Timeline, of: str) -> Plot:
    """Return a plot of epochs over time: one line, which all members share, and marks of lost groups."""
    x, y = zip(*timeline.progress, strict=True)
    line = {"mode": "lines", "shape": "hv", "colour": 0, "hovertemplate": "%{y:.4g} epochs"}
    traces: list[Trace] = [{"type": "scatter", "name": "all members", "x": x, "y": y, **line}]
    for kind, marks in timeline.marks.items():
        mark = _marks(kind, [at for _, (at, _) in marks], [epochs for _, (_, epochs) in marks])
        traces.append({**mark, "text": [f"replica group {replica_group}" for replica_group, _ in marks]})
    title = f"{of}progress: {count_text(max(y), 'epoch')} in {second_text(timeline.end)}"
    return Plot(title, traces, wide=True, layout={"yaxis": {"title": "epochs"}, "xaxis": {"title": SECONDS}})


def _units(timeline: Timeline, unit: str, of: str) -> Plot:
    """Return a plot of a resource over time, with a line per group. Hovering shows all groups' units."""
    given = [*timeline.units[unit], (timeline.end, timeline.units[unit][-1][1])]
    x = [at for at, _ in given]
    look = {"type": "scatter", "mode": "lines", "shape": "hv"}
    traces: list[Trace] = [
        {"name": f"replica group {i}", "x": x, "y": [units.get(i) for _, units in given], "colour": i, **look}
        for i in timeline.replica_groups
    ]
    totals = [sum(units.values()) for _, units in given]
    span = f"{min(totals):,}" if min(totals) == max(totals) else f"{min(totals):,} to {max(totals):,}"
    axes = {"yaxis": {"title": unit, "rangemode": "tozero"}, "xaxis": {"title": SECONDS}}
    title = f"{of}{unit} of each replica group: {span} in all"
    return Plot(title, traces, wide=True, layout={**axes, "hovermode": "x unified"})


def _marks(kind: str, x: Sequence[float], y: Sequence[float]) -> Trace:
    look = {"mode": "markers", "symbol": MARKS.get(kind, "star"), "size": 11, "colour": -1}
    return {"type": "scatter", "name": str(kind), "x": x, "y": y, **look}
