"""Whether a run's groups stay as far apart as the probe saw them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hpcsgd.errors import count_text
from hpcsgd.train.growth import COMPARED

FACTOR = 2.0
"""So many times more or less than the probe saw is told; the fall of the loss alone changes D by less."""
FULL_RATE = 0.9
"""Below this share of the probe's learning rate a small D is no surprise."""


@dataclass
class DistanceMonitor:
    """What the probe saw of so many groups: their distance D, at the learning rate `lr`."""

    P: int
    D: float
    lr: float
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=COMPARED))
    _state: str = "kept"

    @classmethod
    def read(cls, probe: Mapping[str, Any], P: int) -> DistanceMonitor | None:
        """From the contents of a ``probe.json``; None where P groups were not probed."""
        row = next((row for row in probe["rows"] if row["P"] == P and row["diverged"] is None), None)
        return None if row is None else cls(P, row["D"], row["lr"])

    def hear(self, D: float, lr: float) -> str | None:
        """Of a meeting, at the learning rate `lr`; what there is to say, once for every change."""
        self._recent.append((D, lr))
        if len(self._recent) < COMPARED:
            return None
        D, lr = median(D for D, _ in self._recent), min(lr for _, lr in self._recent)
        before, self._state = self._state, self._judged(D, lr)
        if self._state == before:
            return None
        saw = f"D = {D:.3g}, the probe saw {self.D:.3g} with {count_text(self.P, 'group')}"
        return {
            "far": f"the groups are further apart than probed ({saw}): accuracy may suffer, probe again",
            "close": f"the groups are closer than probed ({saw}): more may do from here on, probe again",
            "kept": f"the groups are as far apart as probed again ({saw})",
        }[self._state]

    def _judged(self, D: float, lr: float) -> str:
        if D > FACTOR * self.D:
            return "far"
        if D >= self.D / FACTOR or self._state == "far":
            return "kept"
        return "close" if lr >= FULL_RATE * self.lr else self._state
