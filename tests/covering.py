"""A choice among the combinations of a test's parameters in which all values, or all pairs of values, occur.

Most mistakes show with one value of a parameter, or with two values together. A choice of all pairs is known
as pairwise testing. `strength` says what `make test-all` runs. The other combinations get the mark `long`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

RANKS = ("n", "P", "K", "now")
"""Parameters that set the ranks of a test that runs on ranks: together they are one shape."""
METHODS = ("method", "label")
"""Parameters that say which method of the table is tested."""
MANY = 12
"""From this number of methods on, a test counts as one of the whole table of methods."""
RARE = ("long", "soak", "large")
OF_BACKENDS = "tests/comm/"
"""Tests of what differs between threads and processes."""
ALSO_ON_RANKS = ("processes", "every_method")
"""Marks of other tests for which it matters that ranks are processes."""
Values = tuple[tuple[str, str], ...]
"""Parameters, each with a value."""


def repeated(items: Iterable[pytest.Item], *, on_ranks: bool) -> Iterator[pytest.Item]:
    """Yield the items that the long run takes, because other items of their function have their values."""
    for own in by_function(items).values():
        ordered = sorted(own, key=quick_first)
        tried = set(covering([factors(item) for item in ordered], strength(own, on_ranks=on_ranks)))
        yield from (item for i, item in enumerate(ordered) if i not in tried)


def strength(own: Sequence[pytest.Item], *, on_ranks: bool) -> int:
    """Return how many values of a function's items occur together in a choice; 0 stands for one item alone.

    Threads try pairs, but single values in slow tests, and in tests of the whole table of methods that do not
    compare methods with plain torch. Ranks that are processes run the same code over another backend. They
    try pairs in tests that only they can run, single values in tests of backends and in comparisons with
    plain torch, and one case of each other test.
    """
    marks = {name for item in own for name in (*ALSO_ON_RANKS, "slow") if marked(item, name)}
    if "processes" in marks:
        return 2
    if on_ranks:
        return int("every_method" in marks or own[0].nodeid.startswith(OF_BACKENDS))
    if "slow" in marks or (methods_of_table(own) and "every_method" not in marks):
        return 1
    return 2


def marked(item: pytest.Item, name: str) -> bool:
    """Return True if an item has a mark."""
    return item.get_closest_marker(name) is not None


def methods_of_table(items: Sequence[pytest.Item]) -> list[str]:
    """Return the methods that a function tests, if it tests the whole table of methods; otherwise nothing."""
    methods = list(dict.fromkeys(method for item in items if (method := method_of(item)) is not None))
    return methods if len(methods) >= MANY else []


def method_of(item: pytest.Item) -> str | None:
    """Return the method that an item tests, or None."""
    return next((repr(parameters(item)[name]) for name in METHODS if name in parameters(item)), None)


def by_function(items: Iterable[pytest.Item]) -> Mapping[str, list[pytest.Item]]:
    """Return the items of each test function that have no mark in `RARE`."""
    found: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not any(marked(item, name) for name in RARE):
            found[item.nodeid.split("[")[0]].append(item)
    return found


def parameters(item: pytest.Item) -> Mapping[str, Any]:
    """Return the values that the test function is called with, by name."""
    return item.callspec.params if hasattr(item, "callspec") else {}  # pyright: ignore[reportAttributeAccessIssue]


def factors(item: pytest.Item) -> dict[str, str]:
    """Return what distinguishes an item from others of its function: each parameter, and the shape as one."""
    found = {name: repr(value) for name, value in parameters(item).items()}
    if "run" in getattr(item, "fixturenames", ()):
        shape = {name: found.pop(name) for name in RANKS if name in found}
        if shape:
            found["shape"] = repr(shape)
    return found


def quick_first(item: pytest.Item) -> tuple[bool, tuple[bool, bool, int]]:
    """Return a sort key: tests that are not slow come first, of these those with difficult shapes."""
    return marked(item, "slow"), difficult_first(item)


def difficult_first(item: pytest.Item) -> tuple[bool, bool, int]:
    """Return a sort key: several groups of several ranks come first, then numbers that are no power of 2."""
    match parameters(item):
        case {"P": int(P), "K": int(K)} | {"now": (int(P), int(K))}:
            several, n = P > 1 and K > 1, P * K
        case {"n": int(n)} | {"P": int(n)} | {"K": int(n)}:
            several = n > 1
        case _:
            return False, False, 0
    return not several, n & (n - 1) == 0, n


def covering(found: Sequence[Mapping[str, str]], together: int) -> list[int]:
    """Return the indices of some combinations in which each `together` values occur that occur in `found`.

    Each next one is that with most values that have not occurred, the first of several such.
    """
    values = [_together(each, together) for each in found]
    missing = set(itertools.chain.from_iterable(values))
    waiting = [(-len(each), i) for i, each in enumerate(values)]
    heapq.heapify(waiting)
    chosen: list[int] = []
    while waiting:
        gain, i = heapq.heappop(waiting)
        new = len(values[i] & missing)
        if new < -gain:  # others have been chosen since it was counted
            if new > 0:
                heapq.heappush(waiting, (-new, i))
            continue
        chosen.append(i)
        missing -= values[i]
    return sorted(chosen)


def _together(values: Mapping[str, str], together: int) -> set[Values]:
    return set(itertools.combinations(sorted(values.items()), min(together, len(values))))
