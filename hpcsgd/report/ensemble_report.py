"""The report of a run of islands: their records put together, the usual curves, and who was alive when."""

from __future__ import annotations

import logging
from pathlib import Path

from hpcsgd.errors import count_text
from hpcsgd.islands import event_log
from hpcsgd.report import run_folder
from hpcsgd.report.curves import plot_curves
from hpcsgd.report.ensemble_picture import plot_events
from hpcsgd.report.metrics import Record, read
from hpcsgd.report.summary import summary, summary_text

log = logging.getLogger(__name__)


def report_ensemble(folder: Path) -> None:
    """Writes ``summary.json``, ``curves.png`` and ``islands.png``; tells the summary."""
    records = gather(folder)
    events = event_log.of_run(folder)
    plot_events(events, folder / "islands.png")
    if not records:
        return
    numbers = summary(records)
    numbers["samples"] = samples = _samples(folder)  # what records of one island cannot tell
    numbers["samples_per_s"] = samples / numbers["seconds"] if numbers["seconds"] else None
    run_folder.write_summary(folder, numbers)
    plot_curves(records, folder / "curves.png")
    print(f"{summary_text(numbers)}\nislands   {_deaths(events)}\nwritten   {folder}", flush=True)


def gather(folder: Path) -> list[Record]:
    """Steps and epochs of the island that made the most, evaluations of all: whoever was first made them."""
    of_islands = _of_islands(folder)
    if not any(of_islands):
        return []
    longest = max(of_islands, key=lambda records: max((r["step"] for r in records), default=0))
    others = [r for records in of_islands if records is not longest for r in records]
    evaluations = [r for r in others if r["kind"] == "evaluation"]
    return sorted([*longest, *evaluations], key=lambda record: record["step"])


def _of_islands(folder: Path) -> list[list[Record]]:
    return [read(path) for path in sorted((folder / "islands").glob("*/metrics.jsonl"))]


def _samples(folder: Path) -> int:
    """Seen by all islands together."""
    return sum(record.get("samples", 0) for records in _of_islands(folder) for record in records)


def _deaths(events: list[event_log.Event]) -> str:
    rounds = sum(event["event"] == "commit" for event in events)
    ends = [event["kind"] for event in events if event["event"] == "lost"]
    left = ends.count(event_log.Loss.LEFT)
    back = sum(len(event["newcomers"]) for event in events if event["event"] == "generation")
    lost = count_text(len(ends) - left, "time")
    told = f"{count_text(rounds, 'round')}, lost {lost}, returned {count_text(back, 'time')}"
    return f"{told}, left {count_text(left, 'time')}" if left else told
