"""The records of a run, whether its ranks were one world or islands that recorded apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from pathlib import Path

from hpcsgd.report import metrics
from hpcsgd.report.metrics import Record

METRICS, ISLANDS = "metrics.jsonl", "replica_groups"


def of_run(folder: Path) -> Iterable[Record]:
    """All records of a run in order, one at a time; none where nothing was recorded.

    Of a run of islands: steps and epochs of the one that made the most, evaluations of all, since whoever was
    first made them.
    """
    if (file := folder / METRICS).exists():
        return metrics.stream(file)
    if not (files := _of_replica_groups(folder)):
        return []
    longest = max(files, key=lambda file: max((r["step"] for r in metrics.stream(file)), default=0))
    others = [_evaluations(file) for file in files if file != longest]
    return merge(metrics.stream(longest), *others, key=lambda record: record["step"])


def samples_of_replica_groups(folder: Path) -> int | None:
    """The samples of all islands together, which the records of one cannot tell; None for one world."""
    if not (folder / ISLANDS).is_dir():
        return None
    return sum(r.get("samples", 0) for file in _of_replica_groups(folder) for r in metrics.stream(file))


def _of_replica_groups(folder: Path) -> list[Path]:
    return sorted((folder / ISLANDS).glob(f"*/{METRICS}"))


def _evaluations(file: Path) -> Iterator[Record]:
    return (record for record in metrics.stream(file) if record["kind"] == "evaluation")
