"""The overlap of copies and messages with kernels, compared with the trace of `hpcsgd train`."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from gpu.section import Found, Setting
from harness import Goal, on_ranks
from hpcsgd.files.pictures import STYLE, save
from hpcsgd.report.overlap import Interval, length, union, without

RANKS = 4
UNSEEN = 0.1
"""Goal: the share of the seconds of messages that the trace calls hidden in which no kernel ran."""
DEFAULT_STREAM = 7
"""The number that the profiler gives to CUDA's default stream."""
COPIES = {
    "Memcpy DtoH": "copies to the host",
    "Memcpy HtoD": "copies to the GPU",
    "Memcpy DtoD": "copies on the GPU",
    "Memset": "filling memory",
}
"""The names of lines, by the profiler's names."""
HEAD = ["what", "ms", "beside kernels ms", "part"]


def measure(setting: Setting, found: Found) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "overlap.json"
        words = ["--out", str(out), "--kind", setting.kind, *(["--rehearse"] if setting.rehearse else [])]
        on_ranks(RANKS, Path(__file__).with_name("overlap_rank.py"), words, setting.seconds * 0.8)
        told = json.loads(out.read_text())
    kernels = union(itertools.chain(*told["kernels"].values()))
    rows = [row_of("messages", told["messages"], kernels)]
    rows += [row_of(stream, some, kernels) for stream, some in told["copies"].items()]
    hidden = sum(told["trace"]["hidden"].values())
    exposed = sum(told["trace"]["exposed"].values())
    rows += [
        {"what": "hidden by the trace", "ms": 1e3 * hidden},
        {"what": "waited for by the trace", "ms": 1e3 * exposed},
    ]
    for number, (begin, end) in enumerate(told["steps"], 1):
        messages = within(told["messages"], begin, end)
        rows += [row_of(f"messages of step {number}", messages, kernels)]
        rows += [{"what": f"kernels of step {number}", "ms": length(within(kernels, begin, end)) / 1e3}]
    goals = []
    if kernels:
        beside = rows[0]["beside_ms"]
        goals = [
            Goal(
                "of what the trace calls hidden, what was beside no kernel",
                max(1 - beside / (1e3 * hidden or 1), 0),
                UNSEEN,
            )
        ]
        draw(told, setting.folder / "overlap.png")
    found.show("overlap", rows, HEAD, [cells(row) for row in rows], goals)


def row_of(what: str, some: Sequence[Interval], kernels: Sequence[Interval]) -> dict[str, Any]:
    """Return the milliseconds of all intervals, and of those in which kernels ran.

    Intervals are in microseconds.
    """
    whole = union((start, end) for start, end in some)
    alone = length(without(whole, [(start, end) for start, end in kernels]))
    return {"what": what, "ms": length(whole) / 1e3, "beside_ms": (length(whole) - alone) / 1e3}


def within(some: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    return [(max(a, begin), min(b, end)) for a, b in some if b > begin and a < end]


def cells(row: dict[str, Any]) -> list[object]:
    beside = row.get("beside_ms")
    part = "" if beside is None or not row["ms"] else f"{beside / row['ms']:.2f}"
    return [row["what"], f"{row['ms']:.2f}", "" if beside is None else f"{beside:.2f}", part]


def lines_of(told: dict[str, Any]) -> dict[str, list[Interval]]:
    """Return the intervals of each line of the picture.

    Streams other than the default one share a line, and so do all copies in one direction.
    """
    found: dict[str, list[Interval]] = {}
    for name, some in told["kernels"].items():
        stream = "the default stream" if name.endswith(f" {DEFAULT_STREAM}") else "other streams"
        found.setdefault(f"kernels of {stream}", []).extend(some)
    for name, some in told["copies"].items():
        what: str = name.partition(",")[0]
        found.setdefault(COPIES.get(what, what), []).extend(some)
    return found | {"messages": told["messages"]}


def draw(told: dict[str, Any], target: Path) -> None:
    """Draw the last two steps, with one line each for kernels, copies and messages."""
    begin, end = told["steps"][-2][0], told["steps"][-1][1]
    lines = lines_of(told)
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 1 + 0.45 * len(lines)), dpi=120, layout="constrained")
        axes = figure.subplots()
        for place, some in enumerate(lines.values()):
            spans = [((a - begin) / 1e3, (b - a) / 1e3) for a, b in some if b > begin and a < end]
            axes.broken_barh(spans, (place - 0.4, 0.8), color=f"C{place % 10}")
        axes.set_yticks(range(len(lines)), list(lines))
        axes.set_xlim(0, (end - begin) / 1e3)
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds", title="two steps of one of 2 × 2 ranks that share a GPU")
        save(figure, target)
