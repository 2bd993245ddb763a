"""What the threads of a rank do, one event after another, while somebody wants to know."""

from __future__ import annotations

import threading
from typing import NamedTuple

MOST = 200_000
"""Events that are kept; what comes later is counted alone. Services may answer very often."""


class Event(NamedTuple):
    """Seconds are those of `time.perf_counter`."""

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
    """Of the communicator."""


MESSAGE, WAIT, SPAN = "message", "wait", "span"


class Events:
    """Of the rank whose training runs on the thread that makes this. Any thread may add to them."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.lost = 0
        self._noted: list[Event] = []

    def note(self, event: Event) -> None:
        """Another one, which has just ended."""
        if len(self._noted) < MOST:
            self._noted.append(event)
        else:
            self.lost += 1

    def take(self) -> list[Event]:
        """All since the last time."""
        taken, self._noted = self._noted, []
        return taken
