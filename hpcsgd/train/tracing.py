"""Trace some steps of a run: record windows of events, and gather those of all ranks in one file.

For every window each rank's clock is compared with that of rank 0, by short messages. All messages are sent
by the communication thread of `control`, so that training does not wait. A window is in the file as soon as
all ranks have finished it. The trace uses the backend of `control` directly, because its own messages should
not be in the statistics of the training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hpcsgd.comm import Backend, Communicator, Work
from hpcsgd.comm.events import SPAN, Event, Events
from hpcsgd.config.windows import windows
from hpcsgd.core.topology import Topology
from hpcsgd.report.overlap import overlap, together
from hpcsgd.report.trace import (
    TRAINING,
    Clock,
    TraceSync,
    Window,
    append,
    beginning,
    lines,
    text_of,
    totals_line,
)

log = logging.getLogger(__name__)

ASKED = 8
"""Number of times that rank 0 reads another rank's clock. The shortest round trip counts."""
RARE = ("eval", "checkpoint")
"""Names of spans that are also recorded between windows."""


class Tracer(Protocol):
    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return a context that records a part of the training under `name`."""
        ...

    def waited(self, seconds: float) -> None:
        """Record that the loop has waited for samples for these `seconds` until now."""
        ...

    def stepped(self, t: int, metrics: Mapping[str, float]) -> None:
        """Record that step t is done, with the `metrics` of the method. Collective."""
        ...

    def finish(self) -> None:
        """Finish after the last step; return when everything is in the file. Collective."""
        ...


class Untraced:
    """A tracer that records nothing."""

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def waited(self, seconds: float) -> None:
        pass

    def stepped(self, t: int, metrics: Mapping[str, float]) -> None:
        pass

    def finish(self) -> None:
        pass


class Trace:
    """A trace of the steps that `which` selects, in a run that has made `done` steps already. Collective.

    Only rank 0 writes `file`.
    """

    def __init__(self, topology: Topology, control: Communicator, file: Path, which: str, done: int) -> None:
        self._job, self._control, self._file = topology, control, file
        self._windows = windows(which, done)
        self._next = next(self._windows, None)
        self._events = Events()
        self._threads = {self._events.owner: TRAINING}
        self._begin: float | None = None  # the beginning of the open window
        self._steps = 0
        self._syncs: list[TraceSync] = []
        self._under_way: list[Work] = []
        self._began = 0.0
        if topology.rank == 0:
            self._began = beginning(file) or time.time()
        control.barrier()  # no rank records anything before the time `_began`
        self._follow(done, time.perf_counter())

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._begin is not None or name in RARE:
            self._note(name, start, time.perf_counter())

    def waited(self, seconds: float) -> None:
        now = time.perf_counter()
        if self._begin is not None:
            self._note("data", max(now - seconds, self._begin), now)

    def stepped(self, t: int, metrics: Mapping[str, float]) -> None:
        now = time.perf_counter()
        if self._begin is not None:
            self._note(f"step {t}", self._step_began, now)
            self._steps += 1
            if "distance" in metrics:
                self._syncs.append(TraceSync(t, metrics["distance"], now))
            assert self._next is not None
            if t + 1 >= self._next.stop:
                self._close(now)
        self._follow(t, now)

    def finish(self) -> None:
        self._close(time.perf_counter())
        for work in self._under_way:
            work.wait()
        self._under_way.clear()

    def _note(self, name: str, start: float, end: float) -> None:
        self._events.note(Event(SPAN, name, "", threading.get_ident(), start, end))

    def _follow(self, t: int, now: float) -> None:
        """Begin the step after step t, and a window if one starts with that step.

        An elastic group may jump to a later step. It skips the windows of the steps in between.
        """
        self._step_began = now
        while self._begin is None and self._next is not None and self._next.stop <= t + 1:
            self._next = next(self._windows, None)
        if self._begin is None and self._next is not None and t + 1 in self._next:
            self._begin = now
            self._job.world.stats.events = self._events

    def _close(self, now: float) -> None:
        stats = self._job.world.stats
        stats.events = None
        begin = now if self._begin is None else self._begin
        seen = Window(begin, now, self._steps, self._events.take(), tuple(self._syncs), self._events.lost)
        if self._begin is not None:
            self._next = next(self._windows, None)
        self._begin, self._steps, self._syncs = None, 0, []
        names = {thread.ident or 0: thread.name for thread in threading.enumerate()}
        brought = self._control.run(lambda: self._bring_together(seen, names), "trace")
        self._under_way.append(brought)

    def _bring_together(self, seen: Window, names: Mapping[int, str]) -> None:
        """Send this rank's window to rank 0, which writes all windows; runs on the thread of `control`."""
        topology, owner = self._job, self._events.owner
        clock = self._compared()
        label = (
            f"group {topology.group_index}, shard index {topology.shard_index}, "
            f"clock within {clock.error * 1e6:.0f} µs of rank 0"
        )
        text = text_of(lines(seen, topology.rank, label, self._threads, names, clock))
        own: dict[str, Any] = {**overlap(seen, owner), "clock_error": clock.error}
        if topology.rank:
            _send(self._control.backend, json.dumps(own).encode())
            _send(self._control.backend, text)
        else:
            self._write(seen, clock, text, own)

    def _write(self, seen: Window, clock: Clock, text: bytes, own: dict[str, Any]) -> None:
        """Append rank 0's window to the file, then those that the other ranks send; only rank 0 calls this.

        If the file cannot be written, log a warning and drop the windows, so that the training continues.
        """
        pieces = self._parts(seen, clock, text, own)
        try:
            append(self._file, self._began, pieces)
        except OSError as error:
            for _ in pieces:  # the other ranks' messages have to be received
                pass
            log.warning("%s: cannot be written: %s", self._file, error.strerror)

    def _parts(self, seen: Window, clock: Clock, text: bytes, own: dict[str, Any]) -> Iterator[bytes]:
        overlaps = [own]
        yield text
        for rank in range(1, self._control.size):
            overlaps.append(json.loads(_receive(self._control.backend, rank)))
            yield _receive(self._control.backend, rank)
        error = max(each["clock_error"] for each in overlaps)
        totals = {"steps": seen.steps, "ranks": len(overlaps), "clock_error": error, **together(overlaps)}
        yield text_of([totals_line(seen.end, clock, totals)])

    def _compared(self) -> Clock:
        """Return this rank's clock relative to rank 0's. Rank 0 reads one rank's clock after the other."""
        here = time.time() - time.perf_counter() - self._began
        far = self._control.backend
        if far.rank == 0:
            for rank in range(1, self._control.size):
                far.send(_asked(far, rank, here), rank)
            return Clock(here, 0.0)
        reported, ahead = _seconds(0.0), _seconds(0.0, 0.0)
        for _ in range(ASKED):
            far.recv(reported, 0)
            reported[0] = time.perf_counter()
            far.send(reported, 0)
        far.recv(ahead, 0)
        return Clock(*ahead.tolist())


def _asked(far: Backend, rank: int, here: float) -> Tensor:
    """Return the seconds that `rank` has to add to its clock, and their largest error: float64 [2]."""
    answer, found = _seconds(0.0), []
    for _ in range(ASKED):
        before = time.perf_counter()
        far.send(answer, rank)
        far.recv(answer, rank)
        after = time.perf_counter()
        found.append(((after - before) / 2, (before + after) / 2 - float(answer)))
    error, ahead = min(found)
    return _seconds(ahead + here, error)


def _seconds(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _send(far: Backend, text: bytes) -> None:
    far.send(torch.tensor([len(text)], device="cpu"), 0)
    far.send(torch.from_numpy(np.frombuffer(text, np.uint8).copy()), 0)


def _receive(far: Backend, rank: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    far.recv(size, rank)
    text = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    far.recv(text, rank)
    return text.numpy().tobytes()
