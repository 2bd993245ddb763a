"""How long others have been silent, by clocks that run only while somebody listens."""

from __future__ import annotations

import time


def beat(silence: float) -> float:
    """Seconds between two signs of life, where so many without one mean death."""
    return min(1.0, silence / 4)


class Watch:
    """Whoever listens looks at it more often than every `longest` seconds.

    Where that took longer, its process was stopped or its machine asleep: signs of life may have come that
    nobody has read yet, so that the time counts as `longest` and is held against nobody.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._looked, self._seconds = time.monotonic(), 0.0
        self._woke = -longest

    def look(self) -> float:
        """Seconds of listening up to now."""
        now = time.monotonic()
        slept = now - self._looked
        self._seconds += min(slept, self._longest)
        self._looked = now
        if slept > 2 * self._longest:
            self._woke = self._seconds
        return self._seconds

    def just_woke(self) -> bool:
        """Whether others may have given up on whoever listens, but a moment ago."""
        return self.look() - self._woke < self._longest
