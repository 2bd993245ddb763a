"""What a sink is: something that is told, in a process of its own, what goes into ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hpcsgd.report.metrics import Record


@dataclass(frozen=True, slots=True)
class LoggerRun:
    """The run that a sink is told of."""

    id: str
    """The same whenever the run goes on."""
    name: str
    group: str | None
    """The name of the run of all islands, where this is one of them."""
    folder: str
    """Absolute, of what sinks of this run write."""
    resumed_step: int
    """After which the run goes on: what was told of later ones is told again."""
    config: Mapping[str, Any]
    """The job file's tables."""


@runtime_checkable
class Logger(Protocol):
    """Made with a `SinkRun` and the arguments that the job file has for it.

    Whatever it raises ends it, and nothing but it; where it takes long, records wait, and are left out in
    the end. What it prints is in ``sinks/`` of the run folder.
    """

    def write(self, records: Sequence[Record]) -> None:
        """Those that have come since the last call, one or more, as `hpcsgd.report.metrics` has them."""
        ...

    def close(self, failed: bool) -> None:
        """The run is over, or has stopped to go on later; `failed`: it has died."""
        ...


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record, each by its kind and name: ``step/loss``, ``step/phase_seconds/compute``."""
    kind = record["kind"]
    return _numbers(kind, {name: value for name, value in record.items() if name not in ("kind", "step")})


def _numbers(place: str, table: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{place}/{name}", value)
        elif isinstance(value, int | float):
            yield f"{place}/{name}", float(value)


def writable(folder: str, name: str) -> str:
    """The folder `name` in `folder`, which is made where it is not there."""
    path = Path(folder) / name
    path.mkdir(parents=True, exist_ok=True)
    return str(path)
