"""Where the time of a simulated run went, step by step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcsgd.performance.simulation.compute import Seconds

CAUSES = (
    "compute", "in the group", "exchange", "update", "for the link", "messages", "for other groups",
    "meetings", "gather", "failures",
)  # fmt: skip
"""Of a group's time; of these one waits in the group (for its slowest rank), for the link and for other
groups."""
WAITING = ("in the group", "for the link", "for other groups", "failures")
Steps = NDArray[np.intp] | int


class RankTimes:
    """Sums over all groups, (T,) each."""

    def __init__(self, T: int) -> None:
        self.seconds = {cause: np.zeros(T) for cause in CAUSES}
        self.count = np.zeros(T)
        """Groups that have made the step."""
        self.lost = np.zeros(T)
        """Of them, those that had made it in vain."""
        self.first, self.last, self.sum = np.full(T, np.inf), np.zeros(T), np.zeros(T)
        """When they had made it."""

    def add(self, cause: str, steps: Steps, seconds: Seconds | float) -> None:
        """`steps`: one for all, or that of each of the seconds."""
        entry = self.seconds[cause]
        if isinstance(steps, int):
            entry[steps] += np.sum(seconds)
        else:
            entry += np.bincount(steps, np.broadcast_to(seconds, steps.shape), len(entry))

    def finished(self, steps: Steps, times: Seconds) -> None:
        if isinstance(steps, int):
            self.count[steps] += len(times)
            self.sum[steps] += times.sum()
            self.first[steps] = min(self.first[steps], times.min(initial=np.inf))
            self.last[steps] = max(self.last[steps], times.max(initial=0.0))
        else:
            self.count += np.bincount(steps, minlength=len(self.count))
            self.sum += np.bincount(steps, times, len(self.sum))
            np.minimum.at(self.first, steps, times)
            np.maximum.at(self.last, steps, times)

    def forget(self, t: int) -> None:
        """Steps from t on have to be made again; the time that they took is spent."""
        for those, at_first in (
            (self.count, 0),
            (self.lost, 0),
            (self.sum, 0),
            (self.first, np.inf),
            (self.last, 0),
        ):
            those[t:] = at_first

    @property
    def useful(self) -> float:
        """Steps of groups that were not in vain."""
        return float((self.count - self.lost).sum())

    @property
    def mean(self) -> Seconds:
        """When a step was made, in the mean over groups."""
        return self.sum / np.maximum(self.count, 1)

    def totals(self) -> dict[str, float]:
        return {cause: float(seconds.sum()) for cause, seconds in self.seconds.items()}
