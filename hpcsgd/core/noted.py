"""What ranks have to have in common, noted where they do not talk, and compared where they do.

A sampler of one rank sends nothing: that rank may use it alone. An optimizer compares, in its first step,
what each rank has noted of the sampler that it began to use last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from hpcsgd.comm import CommStats, Communicator

Facts = Sequence[tuple[str, str]]
"""Each is a thing and its value in words."""
_noted: WeakKeyDictionary[CommStats, Facts] = WeakKeyDictionary()
"""By the ledger, which all communicators of a rank have in common."""


def note(world: Communicator, facts: Iterable[tuple[str, str]]) -> None:
    """Have these facts compared among the ranks of `world`, and none that were noted before."""
    _noted[world.stats] = tuple(facts)


def noted(world: Communicator) -> Facts:
    """The facts that this rank has noted."""
    return _noted.get(world.stats, ())
