"""The seconds of a simulated run by cause, and the times at which steps ended, for each step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcsgd.performance.simulation.compute import Seconds

CAUSES = (
    "compute", "in the group", "grad_reduce", "update", "for the link", "messages", "for other groups",
    "model_average", "gather", "failures",
)  # fmt: skip
"""The causes of a group's time. "in the group" is the time of waiting for the group's slowest rank."""
WAITING = ("in the group", "for the link", "for other groups", "failures")
Steps = NDArray[np.intp] | int


class RankTimes:
    """Seconds by cause, and the times at which steps ended: sums over all groups for each of T steps."""

    def __init__(self, T: int) -> None:
        self.seconds = {cause: np.zeros(T) for cause in CAUSES}
        self.count = np.zeros(T)
        """The number of groups that have made the step."""
        self.lost = np.zeros(T)
        """The number of groups whose step was lost to a failure."""
        self.first, self.last, self.sum = np.full(T, np.inf), np.zeros(T), np.zeros(T)
        """For each step: the first and the last time at which a group ended it, and the sum over groups."""

    def add(self, cause: str, steps: Steps, seconds: Seconds | float) -> None:
        """Add `seconds` to `cause`. `steps` is the step of all entries of `seconds`, or has one per entry."""
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
        """Reset the counts and end times of the steps from `t` on, which the groups will end again.

        The seconds by cause stay, because that time was spent.
        """
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
        """The number of steps that were not lost, of all groups together."""
        return float((self.count - self.lost).sum())

    @property
    def mean(self) -> Seconds:
        """The time at which each step ended, averaged over groups."""
        return self.sum / np.maximum(self.count, 1)

    def totals(self) -> dict[str, float]:
        return {cause: float(seconds.sum()) for cause, seconds in self.seconds.items()}
