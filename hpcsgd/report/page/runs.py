"""The runs on a page: finding their folders, and reading each folder in one pass."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpcsgd.config.reader import read_toml
from hpcsgd.config.variants import folder_name
from hpcsgd.elastic import event_log
from hpcsgd.errors import UserError
from hpcsgd.files.reading import read_json
from hpcsgd.report import records, trace
from hpcsgd.report.comparison import read_comparison
from hpcsgd.report.page.attempts import COMPLETE, OPEN, STOPPED, AttemptTimeline, timeline
from hpcsgd.report.page.ranks import Rank, ranks
from hpcsgd.report.page.reading import Reading, read
from hpcsgd.report.records import METRICS, REPLICA_GROUPS
from hpcsgd.report.run_folder import JOB_FILE, flat

MOST = 100
"""Maximum number of runs of a page."""


@dataclass(frozen=True)
class Run:
    """The content of a run's folder, as the page shows it."""

    folder: Path
    label: str
    config: Mapping[str, Any]
    """Values of the job file by full keys, such as ``optimizer.lr``."""
    timeline: AttemptTimeline
    reading: Reading
    ranks: Mapping[int, Rank] = field(default_factory=dict)
    """The seconds of each rank in traced steps, if there are any."""
    events: Sequence[event_log.Event] = ()
    """The events of the replica groups, if the run is elastic."""
    touched: datetime | None = None
    """Time of the last change of the run's metrics, log or events."""
    samples: int | None = None
    """Number of samples of all replica groups together, if the run is elastic."""

    @property
    def environment(self) -> dict[str, Any]:
        """The entry of the last start in ``versions.json``, with full keys."""
        attempts = self.timeline.attempts
        return dict(flat(attempts[-1].about)) if attempts else {}

    @property
    def shape(self) -> str:
        known = self.environment
        return f"{known['P']} × {known['K']}" if {"P", "K"} <= known.keys() else "–"

    @property
    def state(self) -> str:
        for event in reversed(self.events):
            if event["event"] in ("finished", "stopped", "started"):
                return {"finished": COMPLETE, "stopped": STOPPED, "started": OPEN}[event["event"]]
        return self.timeline.end


def find(paths: Sequence[Path]) -> dict[str, Path]:
    """Return by label the run folders in `paths`: a path itself, or the runs in it, as of a comparison."""
    found: dict[Path, str] = {}
    for path in paths:
        found |= _runs_in(path)
    if len(found) > MOST:
        raise UserError(f"{len(found)} runs: a page has room for {MOST}")
    parents = os.path.commonpath([path.parent for path in found])
    often = Counter(found.values())
    return {
        label if often[label] == 1 else os.path.relpath(path, parents): path for path, label in found.items()
    }


def _runs_in(path: Path) -> dict[Path, str]:
    path = Path(os.path.abspath(path))
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    if _is_run(path):
        return {path: path.name}
    compared = path / "compare.json"
    variants = read_comparison(compared)["variants"] if compared.exists() else []
    named = {folder_name(row["label"]): row["label"] for row in variants}
    inside = [child for child in sorted(path.iterdir()) if child.is_dir() and _is_run(child)]
    if not inside:
        raise UserError(
            f"{path}: no run folder: neither {METRICS} nor {JOB_FILE}, nor folders with them in it"
        )
    order = list(named)
    inside.sort(key=lambda child: order.index(child.name) if child.name in named else len(order))
    return {child: named.get(child.name, child.name) for child in inside}


def _is_run(path: Path) -> bool:
    return (path / METRICS).is_file() or (path / JOB_FILE).is_file() or (path / REPLICA_GROUPS).is_dir()


def load(label: str, folder: Path) -> Run:
    """Return the content of a run's folder. Raises `UserError` if something in it is damaged."""
    job, traced, events = folder / JOB_FILE, folder / trace.NAME, folder / event_log.NAME
    log = folder / "run.log"
    if not log.exists():
        log = next(iter(sorted(folder.glob(f"{REPLICA_GROUPS}/*/run.log"))), log)
    touched = [file.stat().st_mtime for file in (folder / METRICS, log, events) if file.exists()]
    try:
        return Run(
            folder,
            label,
            dict(flat(read_toml(job))) if job.exists() else {},
            _timeline(folder / "versions.json", log),
            read(folder / METRICS, records.of_run(folder)),
            ranks(traced) if traced.exists() else {},
            event_log.of_run(folder),
            datetime.fromtimestamp(max(touched), UTC) if touched else None,
            records.samples_of_replica_groups(folder),
        )
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error


def _timeline(versions: Path, log: Path) -> AttemptTimeline:
    starts = read_json(versions) if versions.exists() else []
    try:
        if not isinstance(starts, list):
            raise TypeError(f"a {type(starts).__name__}, and no list")
        return timeline(starts, log)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{versions}: not the starts of a run: {error}") from error
