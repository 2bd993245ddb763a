"""Seconds of communication in traced steps: exposed (training waited) and hidden (it computed)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcsgd.comm.events import MESSAGE, WAIT
from hpcsgd.report.trace import Window, read

Interval = tuple[float, float]
PATIENT = ("recv",)
"""Operations that do not count as busy time of a communication thread: they mostly wait for a sender."""
QUANTITIES = ("exposed", "hidden")


def overlap(window: Window, owner: int) -> dict[str, dict[str, float]]:
    """Return the seconds of this rank in a window, by phase.

    In "exposed" seconds the training thread `owner` waited. In "hidden" seconds a communication thread was
    busy with a message, and the training thread did not wait for anything.
    """
    waits: dict[str, list[Interval]] = defaultdict(list)
    messages: dict[str, list[Interval]] = defaultdict(list)
    for event in window.events:
        start, end = max(event.start, window.begin), min(event.end, window.end)
        if start >= end:
            continue
        if event.kind == WAIT and event.thread == owner:
            waits[event.phase].append((start, end))
        elif event.kind == MESSAGE and event.thread != owner and event.name not in PATIENT:
            messages[event.phase].append((start, end))
    standing = union(interval for some in waits.values() for interval in some)
    return {
        "exposed": {phase: length(union(some)) for phase, some in waits.items()},
        "hidden": {phase: length(without(union(some), standing)) for phase, some in messages.items()},
    }


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover the same times as `intervals`."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def without(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the times in `some` that are not in `others`; both are results of `union`."""
    found: list[Interval] = []
    edges = [-math.inf, *(edge for interval in others for edge in interval), math.inf]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    at = 0
    for start, end in some:
        while gaps[at][1] <= start:
            at += 1
        i = at
        while i < len(gaps) and gaps[i][0] < end:
            found.append((max(start, gaps[i][0]), min(end, gaps[i][1])))
            i += 1
    return [(start, end) for start, end in found if start < end]


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def together(ranks: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the mean of `ranks`, which has each rank's result of `overlap`."""
    sums = {quantity: Counter[str]() for quantity in QUANTITIES}
    for rank in ranks:
        for quantity in QUANTITIES:
            sums[quantity].update(rank[quantity])
    return {
        quantity: {phase: seconds / len(ranks) for phase, seconds in of_phases.items()}
        for quantity, of_phases in sums.items()
    }


def per_step(file: Path) -> dict[str, Any]:
    """Return the traced steps, exposed and hidden seconds per step by phase, and the clock error."""
    windows = [line["args"] for line in read(file, '"overlap"') if line["name"] == "overlap"]
    steps = sum(window["steps"] for window in windows)
    found: dict[str, Any] = {"steps": steps}
    for quantity in QUANTITIES:
        sums = Counter[str]()
        for window in windows:
            sums.update(window[quantity])
        found[f"{quantity}_seconds"] = {phase: total / max(steps, 1) for phase, total in sums.most_common()}
    found["clock_error_seconds"] = max((window["clock_error"] for window in windows), default=0.0)
    return found
