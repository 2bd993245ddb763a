"""Reduce a series of any length to a few points in one pass. Spikes stay visible.

Consecutive values form buckets of equal size. Each bucket keeps the smallest value, the largest and the mean.
If there are too many buckets, neighbours are joined, and later buckets hold twice the number of values. So
memory does not grow with the number of values, which need not be known in advance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BUCKETS = 600
"""Maximum number of buckets: with two points each, more than a panel has pixels."""
Points = list[tuple[float, float]]


@dataclass(slots=True)
class Bucket:
    """A summary of consecutive values of a series. `values` is their number."""

    values: int
    low: tuple[float, float]
    """Position and value of the smallest value; `high` is the same for the largest."""
    high: tuple[float, float]
    places: float
    """The sum of the positions. `total` is the sum of the values."""
    total: float

    def join(self, later: Bucket) -> None:
        self.values += later.values
        if later.low[1] < self.low[1]:
            self.low = later.low
        if later.high[1] > self.high[1]:
            self.high = later.high
        self.places += later.places
        self.total += later.total


@dataclass
class ThinnedCourse:
    """A series that keeps only a few points. Values are added in the order of their positions."""

    most: int = BUCKETS
    values: int = 0
    strange: int = 0
    """Number of values that are not finite; they are in no bucket."""
    strange_at: float | None = None
    """Position of the first value that is not finite."""
    last: tuple[float, float] | None = None
    _buckets: list[Bucket] = field(default_factory=list)
    _width: int = 1

    def add(self, at: float, value: float) -> None:
        if not math.isfinite(value):
            self.strange += 1
            self.strange_at = at if self.strange_at is None else self.strange_at
            return
        self.values += 1
        point = self.last = (at, value)
        if len(self._buckets) == self.most and self._buckets[-1].values == self._width:
            self._buckets = _joined(self._buckets)
            self._width *= 2
        new = Bucket(1, point, point, at, value)
        if self._buckets and self._buckets[-1].values < self._width:
            self._buckets[-1].join(new)
        else:
            self._buckets.append(new)

    def extremes(self) -> tuple[float, float] | None:
        """Return the smallest and the largest value of the series, or None if it has no finite values."""
        if not self._buckets:
            return None
        return min(b.low[1] for b in self._buckets), max(b.high[1] for b in self._buckets)

    def points(self, most: int = BUCKETS) -> Points:
        """Return the points of the smallest and largest value of each bucket, in order, and the last point.

        Neighbouring buckets are joined first, until there are at most `most`.
        """
        found: Points = []
        for bucket in self._few(most):
            found += sorted({bucket.low, bucket.high})
        if self.last is not None and found[-1][0] < self.last[0]:
            found.append(self.last)
        return found

    def means(self, most: int) -> Points:
        """Return the mean position and the mean value of each bucket, after joining them as in `points`."""
        return [(b.places / b.values, b.total / b.values) for b in self._few(most)]

    def _few(self, most: int) -> list[Bucket]:
        buckets = self._buckets
        while len(buckets) > max(most, 1):
            buckets = _joined(buckets)
        return buckets


def _joined(buckets: list[Bucket]) -> list[Bucket]:
    """Return new buckets, each of two neighbouring `buckets`, which stay unchanged."""
    found = []
    for i in range(0, len(buckets), 2):
        first = buckets[i]
        joined = Bucket(first.values, first.low, first.high, first.places, first.total)
        if i + 1 < len(buckets):
            joined.join(buckets[i + 1])
        found.append(joined)
    return found
