"""The choice of tests that `make test` runs: every test function that is not slow, with each value once.

Many tests have several parameters, such as the method, the shape and the optimizer. `make test-all` tries all
pairs of their values. A brief run tries every value of each parameter, and prefers difficult shapes.

Many tests are repeated for every method. Tests with the mark `every_method` compare methods with plain torch,
and a brief run tries them for every method. It tries each of the other tests for a quarter of the methods,
and the next such test of a file for the next quarter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from covering import (
    ALSO_ON_RANKS,
    OF_BACKENDS,
    by_function,
    covering,
    difficult_first,
    method_of,
    methods_of_table,
    parameters,
    strength,
)

SETTINGS = frozenset({"n", "ranks", "P", "K", "now", "seed"})
"""Parameters that set the ranks of a test that runs on ranks. A brief run needs one value of each."""
PART = 4
"""Of the methods of a test of the whole table, a brief run tries one in `PART`."""


def brief(items: Iterable[pytest.Item], *, on_ranks: bool = False) -> set[pytest.Item]:
    """Return the items of a brief run.

    For each test function, every value of each parameter occurs in at least one item. Exceptions are the
    parameters in `SETTINGS` and the methods, of which a quarter occurs.

    Args:
        items: The items of a session. Those marked slow, long, soak or large are never chosen.
        on_ranks: True chooses only one item of a test function, and only of tests that depend on the backend.
            This is for MPI ranks, after a run on threads.
    """
    quick = (item for item in items if item.get_closest_marker("slow") is None)
    turns: Counter[str] = Counter()
    chosen: set[pytest.Item] = set()
    for name, own in by_function(quick).items():
        if on_ranks and strength(own, on_ranks=True) == 0:
            continue
        file = name.split("::")[0]
        if (some := _of_some_methods(own, turns[file])) is not own:
            turns[file] += 1
        chosen.update(_base_choices(some)[: 1 if on_ranks else None])
    return chosen


def may_be_for_ranks(file: Path, text: str) -> bool:
    """Return False if a test file with this text has no item that a brief run on ranks would choose."""
    return OF_BACKENDS in file.as_posix() or any(mark in text for mark in ALSO_ON_RANKS)


def _of_some_methods(items: list[pytest.Item], turn: int) -> list[pytest.Item]:
    """Return the items of one function that test some of the methods, or `items` if it tests few or all."""
    methods = methods_of_table(items)
    if not methods or items[0].get_closest_marker("every_method"):
        return items
    tried = {method for i, method in enumerate(methods) if i % PART == turn % PART}
    return [item for item in items if method_of(item) in tried]


def _base_choices(items: list[pytest.Item]) -> list[pytest.Item]:
    ordered = sorted(items, key=difficult_first)
    settings = SETTINGS if "run" in getattr(items[0], "fixturenames", ()) else ()
    found = [
        {name: repr(value) for name, value in parameters(item).items() if name not in settings}
        for item in ordered
    ]
    return [ordered[i] for i in covering(found, together=1)]
