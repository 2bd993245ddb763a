"""Greedy balancing: each load goes into the bin with the least load so far.

Loads are placed in the given order, or the largest first. With the largest first, none of n bins has more
than 4/3 − 1/(3n) times the load of the fullest bin in the best possible division (R. L. Graham: Bounds on
Multiprocessing Timing Anomalies, SIAM Journal on Applied Mathematics, 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def in_order(loads: Sequence[float], bins: int) -> list[int]:
    """Return the bin, 0 … bins−1, of each load; of several bins with the least load, the first is used."""
    filled: list[tuple[float, int]] = [(0, b) for b in range(bins)]
    found: list[int] = []
    for load in loads:
        least, b = filled[0]
        heapq.heapreplace(filled, (least + load, b))
        found.append(b)
    return found


def largest_first(loads: Sequence[float], bins: int) -> list[int]:
    """Return the bin, 0 … bins−1, of each load, when larger loads are placed before smaller ones.

    Equal loads are placed in the given order.
    """
    order = sorted(range(len(loads)), key=lambda i: -loads[i])
    found = [0] * len(loads)
    for i, b in zip(order, in_order([loads[i] for i in order], bins), strict=True):
        found[i] = b
    return found
