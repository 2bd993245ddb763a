"""Which tests `make test` runs: every test function that is not slow, with each value of what it tests once.

Many tests are parametrized by several things at a time: every method on every shape with every optimizer.
`make test-all` tries all combinations. A brief run tries every value that is tested once, and shapes that are
awkward. This is known as base choice testing.

Many tests are repeated for every method. A brief run tries every method in those with the mark
`every_method`, which compare it with plain torch, and a third of the methods in each of the others: a file's
next such test has the next third.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

LEFT_OUT = ("slow", "long", "soak", "large")
SETTINGS = frozenset({"n", "ranks", "P", "K", "now", "seed"})
"""Parameters that say on which ranks a test runs, if it runs on ranks: one value of each is enough."""
METHODS = ("method", "label")
"""Parameters that say which method of the table is tested."""
MANY, PART = 12, 3
"""Of so many methods and more, one in `PART` is tried."""


def brief(items: Iterable[pytest.Item], *, each_value: bool = True) -> set[pytest.Item]:
    """Return the items of a brief run.

    Of each test function, these are so many that each value of each parameter that is not a setting occurs,
    and a third of the methods.

    Args:
        items: The items of a session. Those with a mark in `LEFT_OUT` are never chosen.
        each_value: False takes one item of each test function: on MPI ranks, of what was tried on threads.
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
    """Sort key: several groups of several ranks come first, then numbers that are no power of two."""
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
