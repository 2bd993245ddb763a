"""Every byte and second of communication, counted per phase in one place that all reports read.

A byte is counted at the rank that sends it, under the bandwidth-optimal algorithm of each collective
(Rabenseifner for allreduce), as in the formulas for a latency α and a time per byte β. Over p ranks, a rank
sends 2·(p−1)/p·n bytes in an allreduce of n bytes; (p−1)/p·n in an all-to-all, reduce-scatter or broadcast of
n bytes in all; (p−1)·n in an allgather of n bytes per rank. If p does not divide n, the figure is the mean
over the ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace

from hpcsgd.comm.events import Event, Events

NO_PHASE = "other"
_phase: ContextVar[str] = ContextVar("phase", default=NO_PHASE)
_doing: ContextVar[str] = ContextVar("doing", default="")


@contextlib.contextmanager
def phase(name: str) -> Generator[None, None, None]:
    """Count what is sent inside under `name`, even if a communication thread sends it later."""
    token = _phase.set(name)
    try:
        yield
    finally:
        _phase.reset(token)


@contextlib.contextmanager
def doing(activity: str) -> Generator[None, None, None]:
    """Name what the operations inside belong to, such as "step 4", for messages about deadlocks.

    A communication thread that executes them later keeps the name, as it keeps the phase.
    """
    token = _doing.set(activity)
    try:
        yield
    finally:
        _doing.reset(token)


def activity() -> tuple[str, str]:
    """Return the names of the innermost `doing` and `phase` blocks; "" outside of any `doing` block."""
    return _doing.get(), _phase.get()


@dataclass(slots=True)
class Total:
    """Sums of one phase on one rank."""

    calls: int = 0
    bytes: float = 0.0
    seconds: float = 0.0
    """Seconds that the communication itself took."""
    waited: float = 0.0
    """Seconds for which the caller was blocked, because overlap did not hide them."""


class CommStats:
    """Totals per phase of one rank; all communicators split from one world share it."""

    def __init__(self) -> None:
        self._totals: dict[str, Total] = {}
        self._links: Counter[int] = Counter()
        self._lock = threading.Lock()
        self.events: Events | None = None
        """The record to which each event is added while a trace is taken; otherwise None."""

    def add(self, *, calls: int = 0, sent: float = 0.0, seconds: float = 0.0, waited: float = 0.0) -> None:
        """Add calls, bytes sent and seconds to the totals of the current phase."""
        with self._lock:
            total = self._totals.setdefault(_phase.get(), Total())
            total.calls += calls
            total.bytes += sent
            total.seconds += seconds
            total.waited += waited

    def note(self, kind: str, name: str, start: float, end: float, sent: float = 0.0, ranks: int = 0) -> None:
        """Record one event of the calling thread under the current phase."""
        if (events := self.events) is not None:
            thread = threading.get_ident()
            events.note(Event(kind, name, _phase.get(), thread, start, end, sent, ranks))

    def add_messages(self, sizes: Mapping[int, float]) -> None:
        """Count the bytes of messages by the rank that they go to, in addition to `add`."""
        with self._lock:
            self._links.update(sizes)

    def links(self) -> Counter[int]:
        """Return a copy of the bytes sent in messages to each rank, on all communicators, since the start."""
        with self._lock:
            return self._links.copy()

    def totals(self) -> dict[str, Total]:
        """Return a copy of the totals of each phase since the start."""
        with self._lock:
            return {name: replace(total) for name, total in self._totals.items()}

    def since(self, before: dict[str, Total]) -> dict[str, Total]:
        """Return the totals since `before`, an earlier `totals()`; phases without a new call are left out."""
        grown: dict[str, Total] = {}
        for name, now in self.totals().items():
            then = before.get(name, Total())
            if now.calls > then.calls:
                grown[name] = Total(
                    now.calls - then.calls,
                    now.bytes - then.bytes,
                    now.seconds - then.seconds,
                    now.waited - then.waited,
                )
        return grown
