"""Bar plots: time and bytes by run, phase and rank, and histograms of the method's counts."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcsgd.report.page.runs import Run
from hpcsgd.report.summary import byte_text, second_text

Trace = dict[str, Any]
LABEL = 24
"""Largest number of letters of a run's name that fit next to bars."""
COUNTED = {"staleness": "staleness: updates by others", "ahead": "steps ahead of the slowest"}
PER_RANK = {
    "computing": "computing, by rank: seconds of a traced step",
    "exposed": "exposed, by rank: the training waited for messages, seconds of a traced step",
    "hidden": "hidden, by rank: messages while the training went on, seconds of a traced step",
}
AMOUNTS = {
    "seconds": ("seconds of training steps", second_text),
    "bytes": ("bytes sent by rank 0", byte_text),
}


@dataclass
class Plot:
    """One plot, as the content of a panel: its title, and traces and layout for Plotly."""

    title: str
    traces: list[Trace]
    wide: bool = False
    layout: dict[str, Any] = field(default_factory=dict)


def plain(text: str) -> str:
    """Return the text with special characters escaped, because Plotly interprets text as HTML."""
    return html.escape(text, quote=False)


def phase_bars(runs: Sequence[Run], colours: Mapping[str, int]) -> Iterator[Plot]:
    """Yield plots of seconds and bytes by phase: a bar per phase for one run, a bar per run for several."""
    for quantity, (title, text) in AMOUNTS.items():
        totals = [run.reading.totals.phases[quantity] for run in runs]
        phases = [phase for phase in colours if any(total[phase] for total in totals)]
        if not phases:
            continue
        if len(runs) == 1:
            phases.sort(key=totals[0].__getitem__)
            amounts = [totals[0][phase] for phase in phases]
            marks = [colours[phase] for phase in phases]
            bar = {"type": "bar", "orientation": "h", "x": amounts, "y": list(map(plain, phases))}
            reported = {"text": list(map(text, amounts)), "hoverinfo": "y+text", "colours": marks}
            yield Plot(f"{title}, by phase", [bar | reported], layout=_amount_axis(quantity))
        else:
            labels = [plain(_short(run.label)) for run in runs]
            places = {"tickvals": list(range(len(runs))), "ticktext": labels, "autorange": "reversed"}
            layout = {**_amount_axis(quantity), "yaxis": places, "barmode": "stack", "bars": len(runs)}
            traces = [_stacked([t[phase] for t in totals], phase, colours[phase], text) for phase in phases]
            yield Plot(f"{title}, by phase", traces, layout=layout)
    yield from _links(runs)


def _stacked(amounts: Sequence[float], phase: str, colour: int, text: Any) -> Trace:
    reported = {"customdata": list(map(text, amounts)), "hovertemplate": "%{customdata}"}
    place = {"y": list(range(len(amounts))), "x": list(amounts), "name": plain(phase), "colour": colour}
    return {"type": "bar", "orientation": "h", **place, **reported}


def _short(label: str) -> str:
    return label if len(label) <= LABEL else f"{label[: LABEL - 1]}…"


def _amount_axis(quantity: str) -> dict[str, Any]:
    return {"xaxis": {"ticksuffix": " s" if quantity == "seconds" else "B", "tickformat": "~s"}}


def _links(runs: Sequence[Run]) -> Iterator[Plot]:
    linked = [(i, run) for i, run in enumerate(runs) if run.reading.totals.links]
    if linked:
        traces = []
        for i, run in linked:
            links = sorted(run.reading.totals.links.items())
            groups, sizes = [group for group, _ in links], [size for _, size in links]
            reported = {
                "customdata": list(map(byte_text, sizes)),
                "hovertemplate": "group %{x}: %{customdata}",
            }
            look = {"name": plain(run.label), "run": i, "colour": i}
            traces.append({"type": "bar", "x": groups, "y": sizes, **look, **reported})
        groups = {"title": "group", "dtick": 1} if _narrow(traces) else {"title": "group"}
        layout = {"yaxis": {"ticksuffix": "B", "tickformat": "~s"}, "xaxis": groups}
        yield Plot("bytes of messages from rank 0, by group", traces, layout=layout)


def phase_course(runs: Sequence[Run], colours: Mapping[str, int]) -> Iterator[Plot]:
    """Yield, for a single run, a plot of the seconds per step against steps, stacked by phase."""
    if len(runs) > 1 or len(stretches := runs[0].reading.phases.stretches()) < 2:
        return
    steps = [end for end, _, _ in stretches]
    traces = []
    for phase in runs[0].reading.totals.phases["seconds"]:
        seconds = [round(found[phase] / n, 9) for _, n, found in stretches]
        look = {"run": 0, "name": plain(phase), "colour": colours[phase], "look": "area"}
        traces.append({**look, "step": steps, "y": seconds})
    yield Plot("seconds of a step on rank 0, by phase", traces)


def rank_bars(runs: Sequence[Run], colours: Mapping[str, int]) -> Iterator[Plot]:
    """Yield plots of the seconds per traced step of each rank, for every run with a trace."""
    for run in runs:
        for quantity, title in PER_RANK.items():
            found = {rank: reported.per_step(quantity) for rank, reported in run.ranks.items()}
            phases = [phase for phase in colours if any(each.get(phase) for each in found.values())]
            traces = [
                {
                    **{"type": "bar", "name": plain(phase), "colour": colours[phase], "x": list(found)},
                    "y": [float(f"{each.get(phase, 0):.4g}") for each in found.values()],
                    "hovertemplate": "%{y:.3~s}s",
                }
                for phase in phases
            ]
            if traces:
                ranks = {"title": "rank", "dtick": 1} if len(found) <= 16 else {"title": "rank"}
                layout = {
                    "barmode": "stack",
                    "xaxis": ranks,
                    "yaxis": {"ticksuffix": "s", "tickformat": "~s"},
                }
                yield Plot(title if len(runs) == 1 else f"{run.label}: {title}", traces, layout=layout)


def count_bars(runs: Sequence[Run]) -> Iterator[Plot]:
    """Yield a histogram of each metric that methods count, such as the staleness."""
    for name in dict.fromkeys(name for run in runs for name in run.reading.totals.counts):
        traces = []
        for i, run in enumerate(runs):
            counts = sorted(run.reading.totals.counts.get(name, {}).items())
            total = sum(n for _, n in counts)
            if total:
                place = {"x": [value for value, _ in counts], "y": [n / total for _, n in counts]}
                look = {"name": plain(run.label), "run": i, "colour": i, "hovertemplate": "%{x}: %{y:.2%}"}
                traces.append({"type": "bar", **place, **look})
        layout = {"xaxis": {"dtick": 1} if _narrow(traces) else {}, "yaxis": {"tickformat": ".0%"}}
        yield Plot(f"{COUNTED.get(name, name)}: share of steps", traces, layout=layout)


def _narrow(traces: Sequence[Trace]) -> bool:
    return max((max(trace["x"]) for trace in traces), default=0) <= 16
