"""The log of events of a run's replica groups: one JSON object per line, in the order of time.

===============  =========================================================================================
event            fields in addition to ``event``, ``unix`` and ``at``
===============  =========================================================================================
``started``      replica_group, life, ranks: its processes were started
``ended``        replica_group, life, code: its processes have ended, with exit code ``code``
``generation``   generation, members, newcomers, rounds: which groups average from now on; newcomers have
                 missed rounds, and do not count in the first one, unless they bring late work. rounds:
                 those committed so far
``commit``       generation, rounds, members, counted, t, epoch, fraction: a round is committed. counted:
                 the members whose parameters made the mean; t: updates done;
                 epoch: epochs done, from 0; fraction: the part of the next epoch that is done, 0..1
``lost``         replica_group, why, kind: it is no longer a member; why: text; kind: a `Loss`
``late``         replica_group, why: it is no longer a member, but what it learned counts if it is back in
                 time; otherwise ``lost`` follows, with the kind "late", unless the coordinator was
                 started again meanwhile
``units``        unit, units: what each replica group has from now on, as in `rebalancing`; unit is "ranks",
                 "threads" or "samples"
``finished``     the training is done
``stopped``      the run has ended before the training was done, and may continue in the same file
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
"""The name of a log, in the folder of a run, of a replica group or of a coordinator's term."""


class Loss(StrEnum):
    """The ways in which a replica group can be lost."""

    DIED = "died"
    """The group's processes or its connection ended."""
    SILENT = "silent"
    """The group sent nothing, not even heartbeats, though its connections were open."""
    LATE = "late"
    """The group was alive, but was not ready to average in time."""
    CUT = "cut"
    """The group and another one did not reach each other over the network."""
    LEFT = "left"
    """The group had to stop, and had reported this."""


class EventLog:
    """A JSONL file to which events are appended; each line is written whole and can be read at once.

    Only one `EventLog` at a time may write to a file. A later one continues the file: it removes an
    incomplete last line, and counts seconds from the same start, never backwards.
    """

    def __init__(self, path: Path) -> None:
        path.touch()
        events, size = _load(path)
        os.truncate(path, size)
        self._first: float | None = events[0]["unix"] if events else None
        self._last: float = events[-1]["at"] if events else 0.0
        self._file = path.open("ab", buffering=0)

    def started(self, *, replica_group: int, life: str, ranks: int) -> None:
        """Log that the processes of a replica group were started. A life is one stay of a replica group."""
        self._note("started", replica_group=replica_group, life=life, ranks=ranks)

    def ended(self, *, replica_group: int, life: str, code: int) -> None:
        """Log that a group's processes have ended; ``code`` is negative for a signal, as in `subprocess`."""
        self._note("ended", replica_group=replica_group, life=life, code=code)

    def generation(
        self, *, generation: int, members: Iterable[int], newcomers: Iterable[int], rounds: int
    ) -> None:
        """Log a new generation: the members average from now on.

        The newcomers have missed rounds. They do not count in the first one, unless they bring late work.
        """
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
        """Log a committed round: all members now have the mean of their models.

        The models were averaged after ``t`` updates, which are ``epoch`` epochs and a ``fraction`` of the
        next epoch.
        """
        who = {"members": sorted(members), "counted": sorted(counted)}
        self._note("commit", generation=generation, rounds=rounds, **who, t=t, epoch=epoch, fraction=fraction)

    def lost(self, *, replica_group: int, why: str, kind: Loss) -> None:
        """Log that the other groups continue without this replica group."""
        self._note("lost", replica_group=replica_group, why=why, kind=Loss(kind))

    def late(self, *, replica_group: int, why: str) -> None:
        """Log that the other groups continue without a group whose work counts if it is back in time."""
        self._note("late", replica_group=replica_group, why=why)

    def units(self, *, unit: str, units: Mapping[int, int]) -> None:
        """Log how many ranks, threads or samples each living replica group has from now on."""
        self._note(
            "units", unit=unit, units={replica_group: units[replica_group] for replica_group in sorted(units)}
        )

    def finished(self) -> None:
        """Log that the training is done."""
        self._note("finished")

    def stopped(self) -> None:
        """Log that the run ends here, before the training is done."""
        self._note("stopped")

    def _note(self, event: str, **fields: Any) -> None:
        now = time.time()
        if self._first is None:
            self._first = now
        self._last = max(self._last, round(now - self._first, 6))  # system clocks may be set back
        line = json.dumps({"event": event, "unix": now, "at": self._last, **fields})
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file, to which every event has been written already."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read(path: Path) -> list[Event]:
    """Return all events in the file, in order; an incomplete last line is left out.

    Keys of ``units`` are converted to the indices of replica groups. Raises `UserError`, which names the
    line, if anything else is damaged.
    """
    return _load(path)[0]


def of_run(folder: Path) -> list[Event]:
    """Return all events of the run in `folder`, in order of the time of day; an empty list without a log.

    They come from the log in the run's folder, or from the logs of coordinators and separately started
    replica groups. With several logs, ``at`` is counted from the first event in any of them.
    """
    logs = [folder / NAME, *folder.glob(f"coordinators/*/{NAME}"), *folder.glob(f"replica_groups/*/{NAME}")]
    found = [read(log) for log in logs if log.exists()]
    if len(found) < 2:
        return found[0] if found else []
    events = sorted((event for log in found for event in log), key=lambda event: event["unix"])
    return [{**event, "at": round(event["unix"] - events[0]["unix"], 6)} for event in events]


def _load(path: Path) -> tuple[list[Event], int]:
    """Return the events in `path`, and the number of bytes up to the end of the last complete line."""
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
