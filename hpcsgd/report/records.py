"""The records of a run, static or elastic. In elastic runs each replica group records separately."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from pathlib import Path

from hpcsgd.report import metrics
from hpcsgd.report.metrics import Record

METRICS, REPLICA_GROUPS = "metrics.jsonl", "replica_groups"


def of_run(folder: Path) -> Iterable[Record]:
    """Return all records of a run in order, one at a time; none if nothing was recorded.

    In an elastic run, steps and epochs are those of the group that made the most steps. Evaluations come from
    all groups: one group evaluates at a time, and it may be another one each time.
    """
    if (file := folder / METRICS).exists():
        return metrics.stream(file)
    if not (files := _of_replica_groups(folder)):
        return []
    longest = max(files, key=lambda file: max((r["step"] for r in metrics.stream(file)), default=0))
    others = [_evaluations(file) for file in files if file != longest]
    return merge(metrics.stream(longest), *others, key=lambda record: record["step"])


def samples_of_replica_groups(folder: Path) -> int | None:
    """Return the number of samples of all replica groups together, or None for a static run."""
    if not (folder / REPLICA_GROUPS).is_dir():
        return None
    return sum(r.get("samples", 0) for file in _of_replica_groups(folder) for r in metrics.stream(file))


def _of_replica_groups(folder: Path) -> list[Path]:
    return sorted((folder / REPLICA_GROUPS).glob(f"*/{METRICS}"))


def _evaluations(file: Path) -> Iterator[Record]:
    return (record for record in metrics.stream(file) if record["kind"] == "eval")
