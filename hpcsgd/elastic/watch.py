"""How long others have been silent, by clocks that only run while this process listens."""

from __future__ import annotations

import time


def beat(silence: float) -> float:
    """Return the seconds between two heartbeats, if `silence` seconds without one mean death."""
    return min(1.0, silence / 4)


class Watch:
    """A clock for a listener that reads it more often than every `longest` seconds.

    If a read comes later, the process was stopped or the machine asleep. Heartbeats may have come that have
    not been read yet, so only `longest` seconds are counted.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._looked, self._seconds = time.monotonic(), 0.0
        self._woke = -longest

    def look(self) -> float:
        """Return the seconds of listening up to now."""
        now = time.monotonic()
        slept = now - self._looked
        self._seconds += min(slept, self._longest)
        self._looked = now
        if slept > 2 * self._longest:
            self._woke = self._seconds
        return self._seconds

    def just_woke(self) -> bool:
        """Return True if others may have given up on this listener a moment ago."""
        return self.look() - self._woke < self._longest
