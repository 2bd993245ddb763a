"""Every byte and second of communication, counted per phase in one place that all reports read.

A byte is counted at the rank that sends it, under the bandwidth-optimal algorithm of each collective
(Rabenseifner for allreduce), which is what the α-β formulas count: an allreduce of n bytes over p ranks is
2·(p−1)/p·n, an all-to-all, reduce-scatter or broadcast of n bytes in all is (p−1)/p·n, an allgather of n
bytes a rank is (p−1)·n. Where n is no multiple of p the figure is the mean over the ranks.
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
    """What is sent inside counts under `name`, also when a communication thread sends it later."""
    token = _phase.set(name)
    try:
        yield
    finally:
        _phase.reset(token)


@contextlib.contextmanager
def doing(activity: str) -> Generator[None, None, None]:
    """Say what the operations inside belong to, such as "step 4": the message about ranks that wait for each
    other names it.

    A communication thread that carries them out later keeps it, as it keeps the phase.
    """
    token = _doing.set(activity)
    try:
        yield
    finally:
        _doing.reset(token)


def activity() -> tuple[str, str]:
    """Return what `doing` and `phase` say here; the first is empty outside of any."""
    return _doing.get(), _phase.get()


@dataclass(slots=True)
class Total:
    """Sums of one phase on one rank."""

    calls: int = 0
    bytes: float = 0.0
    seconds: float = 0.0
    """Time the communication itself took."""
    waited: float = 0.0
    """Time the caller stood still for it: what overlap did not hide."""


class CommStats:
    """Totals per phase of one rank; all communicators split from one world share it."""

    def __init__(self) -> None:
        self._totals: dict[str, Total] = {}
        self._links: Counter[int] = Counter()
        self._lock = threading.Lock()
        self.events: Events | None = None
        """What is done and when, where somebody wants to know."""

    def add(self, *, calls: int = 0, sent: float = 0.0, seconds: float = 0.0, waited: float = 0.0) -> None:
        """Count under the phase in force."""
        with self._lock:
            total = self._totals.setdefault(_phase.get(), Total())
            total.calls += calls
            total.bytes += sent
            total.seconds += seconds
            total.waited += waited

    def note(self, kind: str, name: str, start: float, end: float, sent: float = 0.0, ranks: int = 0) -> None:
        """One event of the calling thread, under the phase in force."""
        if (events := self.events) is not None:
            thread = threading.get_ident()
            events.note(Event(kind, name, _phase.get(), thread, start, end, sent, ranks))

    def add_messages(self, sizes: Mapping[int, float]) -> None:
        """Count bytes by the rank they went to, beside `add`."""
        with self._lock:
            self._links.update(sizes)

    def links(self) -> Counter[int]:
        """Bytes sent in messages to each rank, of whatever communicator, since the start; a copy."""
        with self._lock:
            return self._links.copy()

    def totals(self) -> dict[str, Total]:
        """A copy of the sums since the start."""
        with self._lock:
            return {name: replace(total) for name, total in self._totals.items()}

    def since(self, before: dict[str, Total]) -> dict[str, Total]:
        """What came after `before`, an earlier `totals()`; phases without a call are left out."""
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
