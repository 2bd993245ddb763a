"""How far may P grow? Until the distance D between the groups' models no longer keeps up with P.

The hierarchical local SGD paper, section III-C: raise P (2, 4, 8, …) while D grows in proportion to P. Its
figures, read by eye, accept growth ratios of 1.15, 1.10 and 0.91 and reject 0.82 and less. The default
threshold lies between, and what comes near it from either side is called not clear: there is no evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from hpcsgd.engine.lr import lr_scale

THRESHOLD = 0.87
MARGIN = 0.03
"""So near the threshold, on either side, ρ tells nothing."""
WINDOW = 2
"""Meetings over which D is averaged."""
COMPARED = 2 * WINDOW
"""The last meetings, over which D has to be flat and is compared."""
FLAT = 0.1
"""D is flat where its mean over a window is that of the window before, give or take this share."""


@dataclass(frozen=True)
class Growth:
    """ρ(P→P') = (D(P')/D(P)) / (P'/P), over the meetings and seeds that were compared."""

    P: int
    further: int
    """P'."""
    rho: float
    """The median."""
    low: float
    high: float
    """The quartiles around it."""

    def clear(self, threshold: float) -> bool:
        """Whether the quartiles are on one side of `threshold`, and not near it."""
        return self.low >= threshold + MARGIN or self.high < threshold - MARGIN


@dataclass(frozen=True)
class Verdict:
    """`P` is the answer; where the distances leave it open, `unclear` is the next larger P, which may do."""

    P: int
    unclear: int | None
    final: bool
    """Whether probing further P could not change it."""


def is_flat(distances: Sequence[float]) -> bool:
    """The stated test: two neighbouring windows of `WINDOW` meetings whose means differ by at most `FLAT`."""
    if len(distances) < COMPARED:
        return False
    before, now = (math.fsum(d) / WINDOW for d in (distances[-COMPARED:-WINDOW], distances[-WINDOW:]))
    return abs(now - before) <= FLAT * now


def growth(smaller: int, D: Sequence[Sequence[float]], larger: int, E: Sequence[Sequence[float]]) -> Growth:
    """From P = `smaller` with distances `D` to P' = `larger` with `E`, one series a seed.

    The last `COMPARED` meetings that both have are compared, each with the meeting of the same number: before
    it the groups of both have made the same number of updates, at the same point of their ramps.
    """
    ratios: list[float] = []
    for d, e in zip(D, E, strict=True):
        common = list(zip(d, e, strict=False))  # the longer series goes on alone
        ratios += [after / before / (larger / smaller) for before, after in common[-COMPARED:]]
    if len(ratios) == 1:
        return Growth(smaller, larger, ratios[0], ratios[0], ratios[0])
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return Growth(smaller, larger, median(ratios), low, high)


def verdict(P: int, growths: Sequence[Growth], threshold: float = THRESHOLD) -> Verdict:
    """The largest P before ρ drops under `threshold`. The smallest, `P`, is taken for granted: D needs two
    groups, and so says nothing of P = 1."""
    for step in growths:
        if not step.clear(threshold):
            return Verdict(P, step.further, final=True)  # more seeds could tell, more groups cannot
        if step.rho < threshold:
            return Verdict(P, None, final=True)
        P = step.further
    return Verdict(P, None, final=False)


def ideal(P: int, further: int, rule: str) -> float:
    """ρ of groups that walk independently, with steps of the learning rate: D = lr(P)·√((P−1)/P)."""

    def distance(groups: int) -> float:
        return lr_scale(rule, groups) * math.sqrt((groups - 1) / groups)

    return distance(further) / distance(P) / (further / P)


def growths_of(distances: Mapping[int, Sequence[Sequence[float]]]) -> list[Growth]:
    """Between every P and the next, in order; `distances[P]` has one series a seed."""
    Ps = list(distances)
    return [growth(P, distances[P], Q, distances[Q]) for P, Q in pairwise(Ps)]
