"""Which tests `make test` runs: every test function that is not slow, with each value of what it tests once.

Many tests are parametrized by several things at a time: every method on every shape with every optimizer.
`make test-all` tries all combinations. A brief run tries every method on one awkward shape with one
optimizer; the books call this base choice testing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

SETTINGS = frozenset({
    "n", "ranks", "P", "K", "now", "before", "after",
    "optimizer", "dtype", "seed", "device", "placing", "pattern",
    "C", "M", "N", "count", "size", "shape", "step", "steps", "width", "length", "block",
})  # fmt: skip
"""Parameters that say in which setting something is tested, not what is. One value of each will do."""


def brief(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the items of a brief run: of each test function, as many as its parameters have values.

    Args:
        items: The items of a session, of which those marked `slow` are left out.
    """
    functions: dict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            functions[item.nodeid.split("[")[0]].append(item)
    return {item for own in functions.values() for item in _base_choices(own)}


def _base_choices(items: list[pytest.Item]) -> list[pytest.Item]:
    tried: set[tuple[str, str]] = set()
    chosen: list[pytest.Item] = []
    for item in sorted(items, key=_ease):
        values = {(name, repr(value)) for name, value in parameters(item).items() if name not in SETTINGS}
        if not chosen or not values <= tried:
            chosen.append(item)
            tried |= values
    return chosen


def _ease(item: pytest.Item) -> tuple[bool, bool, int]:
    """Sort key that puts awkward settings first: several groups of several ranks, no power of two, few."""
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
