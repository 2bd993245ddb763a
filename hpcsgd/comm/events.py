"""Events of a rank's threads, recorded while a trace is taken."""

from __future__ import annotations

import threading
from typing import NamedTuple

MOST = 200_000
"""The largest number of events that are kept; later ones are only counted."""


class Event(NamedTuple):
    """One event; its times are seconds of `time.perf_counter`."""

    kind: str
    """What the event is: MESSAGE, WAIT or SPAN."""
    name: str
    phase: str
    thread: int
    start: float
    end: float
    sent: float = 0.0
    """The bytes that this rank sent."""
    ranks: int = 0
    """The size of the communicator."""


MESSAGE, WAIT, SPAN = "message", "wait", "span"


class Events:
    """The events of one rank. Its training thread makes this object; any thread may add events."""

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
