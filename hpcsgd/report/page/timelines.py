"""Plots over the time of day: the starts of a requeued job, and who was a member of an ensemble when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from hpcsgd.report.page.bars import Plot, Trace, plain
from hpcsgd.report.page.runs import Run

MARKS = {"died": "x", "silent": "square", "late": "triangle-up", "cut": "diamond", "returned": "circle"}


def restarts(runs: Sequence[Run]) -> Iterator[Plot]:
    """Steps by time of day, where a run was started more than once: each start is a line of its own."""
    traces: list[Trace] = []
    for i, run in enumerate(runs):
        if len(run.story.attempts) < 2:
            continue
        for number, attempt in enumerate(run.story.attempts, start=1):
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


def membership(runs: Sequence[Run]) -> Iterator[Plot]:
    """Of islands, a line each while they were members, and where they were lost or came back."""
    for run in runs:
        if not run.events:
            continue
        from hpcsgd.report.ensemble_picture import tell  # matplotlib is slow to import

        story = tell(run.events)
        traces: list[Trace] = []
        for island, lines in story.lines.items():
            x: list[float | None] = []
            for line in lines:
                x += [line[0][0], line[-1][0], None]
            y = [None if at is None else island for at in x]
            look = {"mode": "lines", "width": 6, "colour": island, "hoverinfo": "x+name"}
            traces.append({"type": "scatter", "name": f"island {island}", "x": x, "y": y, **look})
        for kind, marks in story.marks.items():
            place = {"x": [at for _, (at, _) in marks], "y": [island for island, _ in marks]}
            look = {"mode": "markers", "symbol": MARKS.get(kind, "star"), "size": 11, "colour": -1}
            traces.append({"type": "scatter", "name": str(kind), **place, **look})
        if traces:
            title = "members" if len(runs) == 1 else f"{run.label}: members"
            layout = {"yaxis": {"title": "island", "dtick": 1}, "xaxis": {"title": "seconds since the start"}}
            yield Plot(f"{title}: which islands averaged when", traces, wide=True, layout=layout)
