"""A trace: the events of every thread of every rank in some steps, for viewers of Perfetto and Chrome.

The format is gzipped JSON in the Trace Event Format. Its processes are the ranks; the threads of a process
are the training thread and the communication threads. Times are microseconds on rank 0's clock since the
trace began. Each event is one line, so windows of steps can be added and read one at a time.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hpcsgd.comm.events import MESSAGE, SPAN, WAIT, Event
from hpcsgd.errors import UserError
from hpcsgd.files.atomic import replacing
from hpcsgd.files.reading import parsed

NAME = "trace.json.gz"
TRAINING, SYNCS = 0, 999
"""Thread numbers of the training and of synchronizations. Communication threads have 1, 2, …"""
_END = "]}"
_COMPRESSION = 5
Line = dict[str, Any]


@dataclass(frozen=True)
class Clock:
    """The conversion of a rank's clock to the clock of the trace."""

    ahead: float = 0.0
    """Seconds to add to this rank's `time.perf_counter` to get the time of the trace."""
    error: float = 0.0
    """Largest error, in seconds, relative to rank 0: half of the fastest round trip of a message."""

    def ns(self, seconds: float) -> int:
        return round((seconds + self.ahead) * 1e9)


@dataclass(frozen=True)
class TraceSync:
    """A synchronization after step `t`, with the model distance `D` before it; the step ended at `ended`."""

    t: int
    D: float
    ended: float


@dataclass(frozen=True)
class Window:
    """The events of one rank between two times, and the number of steps in that time."""

    begin: float
    end: float
    steps: int
    events: Sequence[Event]
    syncs: Sequence[TraceSync] = ()
    lost: int = 0


def lines(
    window: Window, rank: int, label: str, threads: dict[int, int], names: Mapping[int, str], clock: Clock
) -> Iterator[Line]:
    """Yield the lines of a rank's window. Threads without a number get one in `threads`, which changes."""
    seen = dict.fromkeys(event.thread for event in window.events)
    for thread in [*(thread for thread in names if thread in seen), *seen]:
        threads.setdefault(thread, len(threads))
    yield from _named(rank, label, threads, names)
    yield _instant(rank, clock, "clock", window.begin, error_us=clock.error * 1e6, events_lost=window.lost)
    for event in sorted(window.events, key=lambda each: (each.start, -each.end)):
        yield _complete(rank, threads[event.thread], clock, event)
    for place, sync in zip(_syncs(window), window.syncs, strict=True):
        if place is not None:
            event = Event(SPAN, "sync", "model_average", 0, *place)
            yield _complete(rank, SYNCS, clock, event) | {"args": {"step": sync.t, "distance": sync.D}}


def _named(rank: int, label: str, threads: Mapping[int, int], names: Mapping[int, str]) -> Iterator[Line]:
    def metadata(what: str, tid: int, **arguments: Any) -> Line:
        return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": arguments}

    yield metadata("process_name", 0, name=f"rank {rank}")
    yield metadata("process_labels", 0, labels=label)
    yield metadata("process_sort_index", 0, sort_index=rank)
    for thread, tid in threads.items():
        name = "training" if tid == TRAINING else names.get(thread, "thread that has ended")
        yield metadata("thread_name", tid, name=name)
        yield metadata("thread_sort_index", tid, sort_index=tid)
    yield metadata("thread_name", SYNCS, name="synchronizations")


def _complete(rank: int, tid: int, clock: Clock, event: Event) -> Line:
    start, end = clock.ns(event.start), clock.ns(event.end)
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "pid": rank, "tid": tid, **times, "cat": event.kind, **_what(event)}


def _what(event: Event) -> Line:
    if event.kind == MESSAGE:
        message = {"operation": event.name, "bytes": round(event.sent), "ranks": event.ranks}
        return {"name": f"{event.phase} {event.name}", "args": {"phase": event.phase, **message}}
    if event.kind == WAIT:
        return {"name": f"wait for {event.phase}", "args": {"phase": event.phase, "for": event.name}}
    return {"name": event.name, "args": {}}


def _instant(rank: int, clock: Clock, name: str, at: float, **arguments: Any) -> Line:
    where = {"pid": rank, "tid": TRAINING, "ts": clock.ns(at) / 1000}
    return {"ph": "i", "s": "t", "name": name, **where, "args": arguments}


def _syncs(window: Window) -> Iterator[tuple[float, float] | None]:
    """Yield begin and end of the messages of each synchronization, or None for one without messages."""
    since = window.begin
    for sync in window.syncs:
        own = [
            event
            for event in window.events
            if event.kind == MESSAGE and event.phase == "model_average" and since <= event.start < sync.ended
        ]
        yield (min(e.start for e in own), max(e.end for e in own)) if own else None
        since = sync.ended


def totals_line(at: float, clock: Clock, totals: Mapping[str, Any]) -> Line:
    """Return the line with a window's totals over all ranks; `at` is the time when the window ended."""
    return _instant(0, clock, "overlap", at, **totals)


def text_of(found: Iterable[Line]) -> bytes:
    return "".join(f",{json.dumps(line)}\n" for line in found).encode()


def append(file: Path, began: float, pieces: Iterable[bytes]) -> None:
    """Add `pieces`, results of `text_of`, to the trace in `file`; a new trace begins at the time `began`.

    The file is a complete trace at all times.
    """
    with replacing(file) as part, gzip.open(part, "wb", _COMPRESSION) as out:
        # The standard library has no types for the result of `gzip.open`.
        whole = cast(Any, out)
        if file.exists():
            for line in _lines(file):
                whole.write(f"{line}\n".encode())
        else:
            other = {"began": began, "clock": "that of rank 0"}
            head = {"displayTimeUnit": "ms", "otherData": other}
            whole.write(f'{json.dumps(head)[:-1]}, "traceEvents": [\n{{}}\n'.encode())
        for piece in pieces:
            whole.write(piece)
        whole.write(f"{_END}\n".encode())


def beginning(file: Path) -> float | None:
    """Return the time (as of `time.time`) from which the trace counts, or None if there is no trace yet."""
    if not file.exists():
        return None
    with _whole(file):
        return float(parsed(next(_lines(file), "") + _END)["otherData"]["began"])


def read(file: Path, only: str = "") -> Iterator[Line]:
    """Yield the events of a trace, or only those whose line contains `only`."""
    with _whole(file):
        found = _lines(file)
        next(found, "")
        for line in found:
            if line.startswith(",") and only in line:
                yield parsed(line[1:])


@contextmanager
def _whole(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not a trace, or damaged: {error}") from error


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines of the trace in `file`, without the line that ends it."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        for line in text:
            if (bare := line.rstrip("\n")) != _END:
                yield bare
