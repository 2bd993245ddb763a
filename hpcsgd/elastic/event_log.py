"""What happens to the islands of a run: one JSON object a line, in the order in which it happened.

===============  =========================================================================================
event            fields beside ``event``, ``unix`` and ``at``
===============  =========================================================================================
``started``      island, life, ranks: its processes were started
``ended``        island, life, code: its processes have ended, with this exit code
``generation``   generation, members, newcomers, rounds: who averages from now on; the parameters of
                 newcomers do not count in the first round. Rounds are those committed
``commit``       generation, rounds, members, counted, t, epoch, fraction: a round is committed. counted:
                 the members whose parameters made the mean; t: updates done;
                 epoch: epochs done, so it counts from 0; fraction: the part of the next that is done, 0..1
``lost``         replica_group, why, kind: it is no longer a member, and why in words and as a `Loss`
``units``        unit, units: what each replica_group has from now on, as in `reallocation`; unit is "ranks",
                 "threads" or "samples"
``finished``     the training is done
``stopped``      the run has ended before that, and may go on in the same file
===============  =========================================================================================

``unix`` is the time of day in seconds since 1970, ``at`` are seconds since the first event of the file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from hpcsgd.errors import UserError
from hpcsgd.files.reading import parsed

Event = dict[str, Any]
NAME = "events.jsonl"
"""Of a log, in the folder of the run, of an island or of a coordinator's term."""


class Loss(StrEnum):
    """How an island was lost."""

    DIED = "died"
    """Its processes or its connection ended."""
    SILENT = "silent"
    """It is there, but frozen: nothing was heard of it."""
    LATE = "late"
    """It was alive, but did not arrive at a meeting in time."""
    CUT = "cut"
    """The network between it and the others is gone."""
    LEFT = "left"
    """It had to stop, and said so."""


class EventLog:
    """Appends events to a JSONL file; each line is written whole and is readable at once.

    One at a time writes to a file. A later one goes on where the last one was: a line that was left half
    written is cut off, and the seconds are counted from the same beginning, never backwards.
    """

    def __init__(self, path: Path) -> None:
        path.touch()
        events, size = _load(path)
        os.truncate(path, size)
        self._first: float | None = events[0]["unix"] if events else None
        self._last: float = events[-1]["at"] if events else 0.0
        self._file = path.open("ab", buffering=0)

    def started(self, *, replica_group: int, life: str, ranks: int) -> None:
        """The processes of an island were started. A life is one run of an island."""
        self._note("started", replica_group=replica_group, life=life, ranks=ranks)

    def ended(self, *, replica_group: int, life: str, code: int) -> None:
        """The processes of an island have ended; ``code`` is negative for a signal, as in `subprocess`."""
        self._note("ended", replica_group=replica_group, life=life, code=code)

    def generation(
        self, *, generation: int, members: Iterable[int], newcomers: Iterable[int], rounds: int
    ) -> None:
        """These islands average from now on; the parameters of newcomers do not count at first."""
        replica_groups = {"members": sorted(members), "newcomers": sorted(newcomers)}
        self._note("generation", generation=generation, **replica_groups, rounds=rounds)

    def commit(
        self,
        *,
        generation: int,
        rounds: int,
        members: Iterable[int],
        counted: Iterable[int],
        t: int,
        epoch: int,
        fraction: float,
    ) -> None:
        """All members hold the mean, after ``t`` updates, ``epoch`` epochs and a ``fraction`` of the next."""
        who = {"members": sorted(members), "counted": sorted(counted)}
        self._note("commit", generation=generation, rounds=rounds, **who, t=t, epoch=epoch, fraction=fraction)

    def lost(self, *, replica_group: int, why: str, kind: Loss) -> None:
        """The others go on without this island."""
        self._note("lost", replica_group=replica_group, why=why, kind=Loss(kind))

    def units(self, *, unit: str, units: Mapping[int, int]) -> None:
        """What each living island has from now on of ranks, threads or samples."""
        self._note(
            "units", unit=unit, units={replica_group: units[replica_group] for replica_group in sorted(units)}
        )

    def finished(self) -> None:
        """The training is done."""
        self._note("finished")

    def stopped(self) -> None:
        """The run ends here, though the training is not done."""
        self._note("stopped")

    def _note(self, event: str, **fields: Any) -> None:
        now = time.time()
        if self._first is None:
            self._first = now
        self._last = max(self._last, round(now - self._first, 6))  # clocks are set back now and then
        line = json.dumps({"event": event, "unix": now, "at": self._last, **fields})
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file; nothing is pending."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read(path: Path) -> list[Event]:
    """All events in order, islands as numbers; a last line that is half written is left out.

    Raises `UserError` naming the line where anything else is damaged.
    """
    return _load(path)[0]


def of_run(folder: Path) -> list[Event]:
    """All events of a run: those of its one log, or of the coordinators and the islands that were started
    apart, in the order of the time of day, from the first of which seconds are counted; none without any."""
    logs = [folder / NAME, *folder.glob(f"coordinators/*/{NAME}"), *folder.glob(f"replica_groups/*/{NAME}")]
    found = [read(log) for log in logs if log.exists()]
    if len(found) < 2:
        return found[0] if found else []
    events = sorted((event for log in found for event in log), key=lambda event: event["unix"])
    return [{**event, "at": round(event["unix"] - events[0]["unix"], 6)} for event in events]


def _load(path: Path) -> tuple[list[Event], int]:
    """The events, and the bytes they take."""
    *lines, half = (text := path.read_bytes()).split(b"\n")
    events = [_event(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    return events, len(text) - len(half)


def _event(line: bytes, where: str) -> Event:
    try:
        found = parsed(line)
        event = {"event": found["event"], "unix": float(found["unix"]), "at": float(found["at"])}
        if "units" in found:
            event["units"] = {int(replica_group): x for replica_group, x in found["units"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{where}: not an event of an event log: {error!r}") from error
    return found | event
