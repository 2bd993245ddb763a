"""Events of a rank's threads, recorded while a trace is taken."""

from __future__ import annotations

import threading
from typing import NamedTuple

MOST = 200_000
"""Events that are kept; later ones are only counted. Threads that answer requests can produce very many."""


class Event(NamedTuple):
    """One event; its times are seconds of `time.perf_counter`."""

    kind: str
    """MESSAGE, WAIT or SPAN."""
    name: str
    phase: str
    thread: int
    start: float
    end: float
    sent: float = 0.0
    """Bytes."""
    ranks: int = 0
    """The size of the communicator."""


MESSAGE, WAIT, SPAN = "message", "wait", "span"


class Events:
    """The events of a rank whose training runs on the thread that makes this. Any thread may add to them."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.lost = 0
        self._noted: list[Event] = []

    def note(self, event: Event) -> None:
        """Record an event that has just ended."""
        if len(self._noted) < MOST:
            self._noted.append(event)
        else:
            self.lost += 1

    def take(self) -> list[Event]:
        """Return all events since the last call."""
        taken, self._noted = self._noted, []
        return taken
