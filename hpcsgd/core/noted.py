"""Facts that must be the same on all ranks: each rank records them, and an optimizer compares them.

A sampler sends nothing itself, because one rank may use it alone. It only notes facts, such as its seed, when
a rank begins to use it. In its first step an optimizer compares the facts that the ranks noted last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from hpcsgd.comm import CommStats, Communicator

Facts = Sequence[tuple[str, str]]
"""Pairs of a name and its value as text."""
_noted: WeakKeyDictionary[CommStats, Facts] = WeakKeyDictionary()
"""The facts that a rank has noted, by its `CommStats`, which all communicators of the rank share."""


def note(world: Communicator, facts: Iterable[tuple[str, str]]) -> None:
    """Note facts that the ranks of `world` will compare, and drop those noted before."""
    _noted[world.stats] = tuple(facts)


def noted(world: Communicator) -> Facts:
    """Return the facts that this rank has noted."""
    return _noted.get(world.stats, ())
