"""Greedy balancing: each load goes into the bin that has least so far.

In the order of the loads, or the largest first: then no bin has more than 4/3 − 1/(3n) times what the fullest
of n bins has where loads are divided as well as can be (R. L. Graham: Bounds on Multiprocessing Timing
Anomalies, SIAM Journal on Applied Mathematics, 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def in_order(loads: Sequence[float], bins: int) -> list[int]:
    """The bin, 0 … bins−1, of each load, the first of those that have least."""
    filled: list[tuple[float, int]] = [(0, b) for b in range(bins)]
    found: list[int] = []
    for load in loads:
        least, b = filled[0]
        heapq.heapreplace(filled, (least + load, b))
        found.append(b)
    return found


def largest_first(loads: Sequence[float], bins: int) -> list[int]:
    """The bin of each load, where larger ones are given out before smaller ones, and equal ones in order."""
    order = sorted(range(len(loads)), key=lambda i: -loads[i])
    found = [0] * len(loads)
    for i, b in zip(order, in_order([loads[i] for i in order], bins), strict=True):
        found[i] = b
    return found
