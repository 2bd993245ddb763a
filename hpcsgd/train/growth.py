"""The largest useful number of groups P, from the distances D between the groups' models.

The hierarchical local SGD paper, section III-C: raise P (2, 4, 8, …) while D grows in proportion to P. The
paper's figures, read by eye, accept growth ratios of 1.15, 1.10 and 0.91 and reject 0.82 and less. The
default threshold lies between. Ratios near the threshold are reported as not clear, because the paper has no
evidence for them.
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
"""A growth ratio ρ that is closer to the threshold than this decides nothing."""
WINDOW = 2
"""Number of synchronizations over which D is averaged."""
COMPARED = 2 * WINDOW
"""Number of last synchronizations whose D must be flat, and is compared between two values of P."""
FLAT = 0.1
"""D is flat if its mean over a window differs from that of the window before by at most this fraction."""


@dataclass(frozen=True)
class Growth:
    """The growth ratio ρ(P→P') = (D(P')/D(P)) / (P'/P) of all compared synchronizations and seeds."""

    P: int
    further: int
    """The larger number of groups, the paper's P'."""
    rho: float
    """The median ratio."""
    low: float
    high: float
    """`low` and `high` are the quartiles of the ratios."""

    def clear(self, threshold: float) -> bool:
        """Return whether both quartiles are on the same side of `threshold`, and not near it."""
        return self.low >= threshold + MARGIN or self.high < threshold - MARGIN


@dataclass(frozen=True)
class Verdict:
    """The largest useful number of groups, `P`; `unclear` is the next larger one if it may do as well."""

    P: int
    unclear: int | None
    final: bool
    """True if a probe of more groups could not change the result."""


def is_flat(distances: Sequence[float]) -> bool:
    """Return whether the mean of the last `WINDOW` distances is that of the `WINDOW` before, up to `FLAT`."""
    if len(distances) < COMPARED:
        return False
    before, now = (math.fsum(d) / WINDOW for d in (distances[-COMPARED:-WINDOW], distances[-WINDOW:]))
    return abs(now - before) <= FLAT * now


def growth(smaller: int, D: Sequence[Sequence[float]], larger: int, E: Sequence[Sequence[float]]) -> Growth:
    """Return the growth from P = `smaller` with distances `D` to P' = `larger` with `E`.

    `D` and `E` have one series of distances per seed. The n-th distances of two series are compared, for the
    last `COMPARED` numbers n that both series have. At the n-th synchronization all groups have made equally
    many updates, with P and with P', and are at the same point of their warm-ups.
    """
    ratios: list[float] = []
    for d, e in zip(D, E, strict=True):
        common = list(zip(d, e, strict=False))  # ignore the rest of the longer series
        ratios += [after / before / (larger / smaller) for before, after in common[-COMPARED:]]
    if len(ratios) == 1:
        return Growth(smaller, larger, ratios[0], ratios[0], ratios[0])
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return Growth(smaller, larger, median(ratios), low, high)


def verdict(P: int, growths: Sequence[Growth], threshold: float = THRESHOLD) -> Verdict:
    """Return the largest P that `growths` reach, in order, while ρ is clearly above `threshold`.

    `P` is the smallest number of groups that was probed, where `growths` begin. It is assumed to be useful,
    because no growth ratio leads to it: the distance D needs two groups. A growth that is not `clear` ends
    the search as well; the verdict then names its larger number of groups as `unclear`.
    """
    for step in growths:
        if not step.clear(threshold):
            return Verdict(P, step.further, final=True)  # more seeds could decide it, more groups cannot
        if step.rho < threshold:
            return Verdict(P, None, final=True)
        P = step.further
    return Verdict(P, None, final=False)


def ideal(P: int, further: int, rule: str) -> float:
    """Return ρ(P→`further`) if groups move independently: D = lr(P)·√((P−1)/P), with lr by `rule`."""

    def distance(groups: int) -> float:
        return lr_scale(rule, groups) * math.sqrt((groups - 1) / groups)

    return distance(further) / distance(P) / (further / P)


def growths_of(distances: Mapping[int, Sequence[Sequence[float]]]) -> list[Growth]:
    """Return the growth from every P to the next, in order; `distances[P]` has one series per seed."""
    Ps = list(distances)
    return [growth(P, distances[P], Q, distances[Q]) for P, Q in pairwise(Ps)]
