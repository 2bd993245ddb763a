"""The interface of a logger, which runs in its own process and gets all records of ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hpcsgd.report.metrics import Record


@dataclass(frozen=True, slots=True)
class LoggerRun:
    """A description of the run whose records a logger gets."""

    id: str
    """The run's id, which stays the same when the run is resumed."""
    name: str
    group: str | None
    """The name of the whole elastic run, if this is one of its replica groups; otherwise None."""
    folder: str
    """Absolute path of the folder in which the loggers of this run keep files."""
    resumed_step: int
    """The step after which the run continues. An earlier start may have written records of later steps."""
    config: Mapping[str, Any]
    """The tables of the job file."""


@runtime_checkable
class Logger(Protocol):
    """A logger. It is made with a `LoggerRun` and the arguments in the job file.

    Exceptions end the logger and nothing else. If the logger is slow, records wait in a queue. If the queue
    is full, further records are left out. What the logger prints is in ``loggers/`` of the run folder.
    """

    def write(self, records: Sequence[Record]) -> None:
        """Write one or more records, as described in `hpcsgd.report.metrics`."""
        ...

    def close(self, failed: bool) -> None:
        """Finish, because the run is over or has stopped. `failed` is True if the run has died."""
        ...


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Yield each number of a record with its name, such as ``step/loss``, ``step/phase_seconds/data``."""
    kind = record["kind"]
    return _numbers(kind, {name: value for name, value in record.items() if name not in ("kind", "step")})


def _numbers(place: str, table: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{place}/{name}", value)
        elif isinstance(value, int | float):
            yield f"{place}/{name}", float(value)


def writable(folder: str, name: str) -> str:
    """Make the folder `name` in `folder` if it does not exist, and return its path."""
    path = Path(folder) / name
    path.mkdir(parents=True, exist_ok=True)
    return str(path)
