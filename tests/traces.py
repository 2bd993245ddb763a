"""A reader of trace files that follows the Trace Event Format's description and uses no code of hpcsgd."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Slice:
    name: str
    start: int
    """The beginning, in nanoseconds."""
    end: int
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Viewed:
    """The contents of a trace: slices and names by process and thread, and instant events."""

    slices: dict[tuple[int, int], list[Slice]]
    processes: dict[int, str]
    threads: dict[tuple[int, int], str]
    instants: list[dict[str, Any]]


def view(file: Path) -> Viewed:
    """Read a trace. Raises if the file is not of the format, or if slices of a thread overlap partly."""
    whole = json.loads(gzip.decompress(file.read_bytes()))
    found = Viewed(defaultdict(list), {}, {}, [])
    for event in whole["traceEvents"]:
        if not event:
            continue
        place = event["pid"], event["tid"]
        match event["ph"]:
            case "X":
                start = round(event["ts"] * 1000)
                end = start + round(event["dur"] * 1000)
                assert 0 <= start <= end
                found.slices[place].append(Slice(event["name"], start, end, event["args"]))
            case "M" if event["name"] == "process_name":
                found.processes[event["pid"]] = event["args"]["name"]
            case "M" if event["name"] == "thread_name":
                found.threads[place] = event["args"]["name"]
            case "M":
                assert event["name"] in ("process_labels", "process_sort_index", "thread_sort_index")
            case "i":
                found.instants.append(event)
            case other:
                raise AssertionError(f"no phase {other!r} in the format")
    for slices in found.slices.values():
        slices.sort(key=lambda each: (each.start, -each.end))
        require_nested(slices)
    return found


def require_nested(slices: list[Slice]) -> None:
    around: list[Slice] = []
    for each in slices:
        while around and around[-1].end <= each.start:
            around.pop()
        assert not around or each.end <= around[-1].end, f"{each} ends after {around[-1]}, in which it began"
        around.append(each)


def seconds_by_phase(seen: Viewed) -> dict[str, dict[str, float]]:
    """Return the exposed and hidden seconds of each phase in all traced steps, averaged over ranks.

    For each interval between two successive edges of slices, this checks which slices cover it.
    """
    sums: dict[str, dict[str, float]] = {"exposed": defaultdict(float), "hidden": defaultdict(float)}
    for rank in seen.processes:
        slices = [
            (*place, each) for place, found in seen.slices.items() if place[0] == rank for each in found
        ]
        steps = [each for _, tid, each in slices if tid == 0 and each.name.startswith("step ")]
        edges = sorted({edge for *_, each in slices for edge in (each.start, each.end)})
        middles = (np.array(edges[1:]) + np.array(edges[:-1])) / 2
        widths = np.diff(edges) / 1e9
        inside = covered(middles, steps)
        waits = {
            phase: [e for _, tid, e in slices if tid == 0 and e.name == f"wait for {phase}"]
            for phase in {str(e.arguments["phase"]) for *_, e in slices if "phase" in e.arguments}
        }
        standing = covered(middles, list(itertools.chain(*waits.values())))
        for phase, own in waits.items():
            sums["exposed"][phase] += float(widths[covered(middles, own) & inside].sum())
            sent = [
                e
                for _, tid, e in slices
                if tid not in (0, 999) and e.arguments.get("phase") == phase and "bytes" in e.arguments
                and e.arguments["operation"] != "recv"
            ]  # fmt: skip
            sums["hidden"][phase] += float(widths[covered(middles, sent) & inside & ~standing].sum())
    n = len(seen.processes)
    return {name: {phase: total / n for phase, total in of.items()} for name, of in sums.items()}


def covered(moments: np.ndarray[Any, Any], slices: list[Slice]) -> np.ndarray[Any, Any]:
    found = np.zeros(len(moments), bool)
    for each in slices:
        found |= (moments > each.start) & (moments < each.end)
    return found
