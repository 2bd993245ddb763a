"""A monitor that compares the distance between a run's groups with the distance in the probe."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hpcsgd.errors import count_text
from hpcsgd.train.growth import COMPARED

FACTOR = 2.0
"""Distances D that differ from the probe's by this factor are reported. A falling loss changes D by less."""
FULL_RATE = 0.9
"""At learning rates below this fraction of the probe's, a small D is expected and not reported."""


@dataclass
class DistanceMonitor:
    """A comparison of recent distances with D, the distance of P groups that a probe saw at the rate `lr`."""

    P: int
    D: float
    lr: float
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=COMPARED))
    _state: str = "kept"

    @classmethod
    def read(cls, probe: Mapping[str, Any], P: int) -> DistanceMonitor | None:
        """Return the monitor for the contents of a ``probe.json``, or None if P groups were not probed."""
        row = next((row for row in probe["rows"] if row["P"] == P and row["diverged"] is None), None)
        return None if row is None else cls(P, row["D"], row["lr"])

    def hear(self, D: float, lr: float) -> str | None:
        """Record the distance D of a synchronization at the learning rate `lr`.

        Return a text to report if the result of the comparison has changed since the last call, else None.
        """
        self._recent.append((D, lr))
        if len(self._recent) < COMPARED:
            return None
        D, lr = median(D for D, _ in self._recent), min(lr for _, lr in self._recent)
        before, self._state = self._state, self._judged(D, lr)
        if self._state == before:
            return None
        saw = f"D = {D:.3g}, the probe saw {self.D:.3g} with {count_text(self.P, 'group')}"
        return {
            "far": f"the distance between groups is larger than probed ({saw}): accuracy may suffer, "
            "probe again",
            "close": f"the distance between groups is smaller than probed ({saw}): more groups may be "
            "possible, probe again",
            "kept": f"the distance between groups is as probed again ({saw})",
        }[self._state]

    def _judged(self, D: float, lr: float) -> str:
        if D > FACTOR * self.D:
            return "far"
        if D >= self.D / FACTOR or self._state == "far":
            return "kept"
        return "close" if lr >= FULL_RATE * self.lr else self._state
