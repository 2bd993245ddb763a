"""A clock that measures how long other processes are silent; it only runs while this process listens."""

from __future__ import annotations

import time


def beat(heartbeat_timeout: float) -> float:
    """Return the seconds between two heartbeats, if a process counts as dead after `heartbeat_timeout` s."""
    return min(1.0, heartbeat_timeout / 4)


class Watch:
    """A clock for a listener, which must read the clock at least every `longest` seconds.

    If a read comes later, the process was stopped or the machine slept. Then heartbeats may have arrived that
    have not been read yet, so only `longest` seconds are counted.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._looked, self._seconds = time.monotonic(), 0.0
        self._woke = -longest

    def look(self) -> float:
        """Return the seconds for which this process has listened so far."""
        now = time.monotonic()
        slept = now - self._looked
        self._seconds += min(slept, self._longest)
        self._looked = now
        if slept > 2 * self._longest:
            self._woke = self._seconds
        return self._seconds

    def just_woke(self) -> bool:
        """Return True if this process was stopped until a moment ago.

        Then other processes may have given up on it meanwhile.
        """
        return self.look() - self._woke < self._longest
