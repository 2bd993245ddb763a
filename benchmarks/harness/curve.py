"""Courses of a training: a score, of which lower values are better, against seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def reached(seconds: Sequence[float], scores: Sequence[float], target: float) -> float | None:
    """Return the seconds after which the score is `target`; None if it never is.

    Between two points the score is linear.
    """
    points = list(zip(seconds, scores, strict=True))
    if points[0][1] <= target:
        return points[0][0]
    for (start, worse), (end, better) in pairwise(points):
        if better <= target:
            return start + (end - start) * (worse - target) / (worse - better)
    return None
