"""The seconds that each rank spent in traced steps: computing, waiting for messages, hidden messages.

For each window, the trace has the events of one rank after the other. So only the events of one rank in one
window are in memory at a time.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpcsgd.comm.events import MESSAGE, SPAN, WAIT, Event
from hpcsgd.errors import UserError
from hpcsgd.report.overlap import QUANTITIES, length, overlap, union, without
from hpcsgd.report.trace import SYNCS, TRAINING, Line, Window, read

COMPUTING = ("data", "forward", "backward", "update")
"""Parts of a step, on the training thread."""


@dataclass
class Rank:
    """The seconds that one rank spent in its traced steps."""

    steps: int = 0
    seconds: dict[str, Counter[str]] = field(
        default_factory=lambda: {quantity: Counter() for quantity in ("computing", *QUANTITIES)}
    )
    """Seconds of "computing" by part of the step; "exposed" and "hidden" by phase, see `report.overlap`."""

    def per_step(self, quantity: str) -> dict[str, float]:
        return {name: total / max(self.steps, 1) for name, total in self.seconds[quantity].items()}


def ranks(trace: Path) -> dict[int, Rank]:
    """Return each rank's totals over all windows. Raises `UserError` if the trace cannot be read."""
    found: dict[int, Rank] = {}
    try:
        for number, window in _windows(trace):
            rank = found.setdefault(number, Rank())
            rank.steps += window.steps
            for quantity, phases in overlap(window, TRAINING).items():
                rank.seconds[quantity].update(phases)
            rank.seconds["computing"].update(_computing(window))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{trace}: not a trace: {error or type(error).__name__}") from error
    return dict(sorted(found.items()))


def _windows(trace: Path) -> Iterator[tuple[int, Window]]:
    """Yield each window of a rank, after the number of the rank.

    A window has only events that ended in it, so its end cuts none of them.
    """
    rank, begin = -1, 0.0
    events: list[Event] = []
    for line in read(trace):
        if line["ph"] == "i":  # "clock" begins the events of a rank in a window, "overlap" ends the window
            if events:
                yield rank, _window(begin, events)
            rank, begin, events = line["pid"], line["ts"] / 1e6, []
        elif line["ph"] == "X" and line["tid"] != SYNCS:
            events.append(_event(line))
    if events:
        yield rank, _window(begin, events)


def _window(begin: float, events: list[Event]) -> Window:
    steps = sum(event.kind == SPAN and event.name.startswith("step ") for event in events)
    return Window(begin, math.inf, steps, events)


def _event(line: Line) -> Event:
    kind, reported = line["cat"], line["args"]
    name = {MESSAGE: reported.get("operation"), WAIT: reported.get("for")}.get(kind) or line["name"]
    start = line["ts"] / 1e6
    return Event(kind, name, reported.get("phase", ""), line["tid"], start, start + line["dur"] / 1e6)


def _computing(window: Window) -> dict[str, float]:
    """Return the training thread's seconds in each of `COMPUTING`, without the time that it waited."""
    own = [e for e in window.events if e.thread == TRAINING and e.end > window.begin]
    standing = union((e.start, e.end) for e in own if e.kind == WAIT)
    return {
        name: length(without(union((e.start, e.end) for e in own if e.name == name), standing))
        for name in COMPUTING
    }
