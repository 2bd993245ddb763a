"""The choice of tests that `make test` runs: every test function that is not slow, with each value once.

Many tests have several parameters, such as the method, the shape and the optimizer. `make test-all` tries all
combinations. A brief run tries every value of each parameter once, and prefers difficult shapes. This is
known as base choice testing.

Many tests are repeated for every method. Tests with the mark `every_method` compare methods with plain torch,
and a brief run tries them for every method. It tries each of the other tests for a third of the methods: the
next such test of a file has the next third.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

LEFT_OUT = ("slow", "long", "soak", "large")
SETTINGS = frozenset({"n", "ranks", "P", "K", "now", "seed"})
"""Parameters that set the ranks of a test that runs on ranks. A brief run needs one value of each."""
METHODS = ("method", "label")
"""Parameters that say which method of the table is tested."""
MANY, PART = 12, 3
"""If a test has at least `MANY` methods, a brief run tries one in `PART`."""


def brief(items: Iterable[pytest.Item], *, each_value: bool = True) -> set[pytest.Item]:
    """Return the items of a brief run.

    For each test function, every value of each parameter occurs in at least one item. Exceptions are the
    parameters in `SETTINGS` and the methods, of which a third occurs.

    Args:
        items: The items of a session. Those with a mark in `LEFT_OUT` are never chosen.
        each_value: False chooses one item of each test function. This is for MPI ranks, after a run on
            threads.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not any(item.get_closest_marker(mark) for mark in LEFT_OUT):
            functions[item.nodeid.split("[")[0]].append(item)
    turns: Counter[str] = Counter()
    chosen: set[pytest.Item] = set()
    for name, own in functions.items():
        file = name.split("::")[0]
        if (some := _of_some_methods(own, turns[file])) is not own:
            turns[file] += 1
        chosen.update(_base_choices(some)[: None if each_value else 1])
    return chosen


def _of_some_methods(items: list[pytest.Item], turn: int) -> list[pytest.Item]:
    """Return the items of one function that test some of the methods, or `items` if it tests few or all."""
    name = next((name for name in METHODS if name in parameters(items[0])), None)
    if name is None or items[0].get_closest_marker("every_method"):
        return items
    methods = list(dict.fromkeys(repr(parameters(item)[name]) for item in items))
    if len(methods) < MANY:
        return items
    tried = set(methods[turn % PART :: PART])
    return [item for item in items if repr(parameters(item)[name]) in tried]


def _base_choices(items: list[pytest.Item]) -> list[pytest.Item]:
    tried: set[tuple[str, str]] = set()
    chosen: list[pytest.Item] = []
    for item in sorted(items, key=_order):
        settings = SETTINGS if "run" in getattr(item, "fixturenames", ()) else ()
        values = {(name, repr(value)) for name, value in parameters(item).items() if name not in settings}
        if not chosen or not values <= tried:
            chosen.append(item)
            tried |= values
    return chosen


def _order(item: pytest.Item) -> tuple[bool, bool, int]:
    """Return a sort key: several groups of several ranks come first, then numbers that are no power of 2."""
    match parameters(item):
        case {"P": int(P), "K": int(K)} | {"now": (int(P), int(K))}:
            several, n = P > 1 and K > 1, P * K
        case {"n": int(n)} | {"P": int(n)} | {"K": int(n)}:
            several = n > 1
        case _:
            return False, False, 0
    return not several, n & (n - 1) == 0, n


def parameters(item: pytest.Item) -> Mapping[str, Any]:
    """Return the values that the test function is called with, by name."""
    return item.callspec.params if hasattr(item, "callspec") else {}  # pyright: ignore[reportAttributeAccessIssue]
