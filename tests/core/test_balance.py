"""Loads are assigned to bins greedily; the results are compared with a second implementation."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hpcsgd.core.balance import in_order, largest_first


def plainly(loads: Sequence[float], bins: int) -> list[int]:
    filled, found = [0.0] * bins, []
    for load in loads:
        b = filled.index(min(filled))
        filled[b] += load
        found.append(b)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_each_load_goes_where_least_is(seed: int) -> None:
    draw = random.Random(seed)
    bins, n = draw.randint(1, 9), draw.randint(0, 40)
    loads = [draw.choice([0, 1, 2, 7, draw.random()]) for _ in range(n)]
    assert in_order(loads, bins) == plainly(loads, bins)
    order = sorted(range(n), key=lambda i: (-loads[i], i))
    given = dict(zip(order, plainly([loads[i] for i in order], bins), strict=True))
    assert largest_first(loads, bins) == [given[i] for i in range(n)]


def test_the_largest_first_are_within_grahams_bound() -> None:
    loads = [5, 5, 4, 4, 3, 3, 3]  # the best assignment has a maximum of 9
    filled = [sum(x for x, b in zip(loads, largest_first(loads, 3), strict=True) if b == j) for j in range(3)]
    assert max(filled) == pytest.approx(9 * (4 / 3 - 1 / 9))


def test_nothing_is_divided_among_any() -> None:
    assert in_order([], 3) == largest_first([], 3) == []
