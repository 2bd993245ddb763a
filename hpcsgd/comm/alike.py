"""A check that all ranks of a job, or all jobs that average together, were given the same.

Each of them makes a list of facts. They compare a checksum of their lists, a few bytes each, and the lists
themselves only if the checksums differ.

A sampler sends nothing itself, because one rank may use it alone. It only notes facts, such as its seed, when
a rank begins to use it. In its first step an optimizer compares the facts that the ranks noted last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

from hpcsgd.comm.communicator import Communicator
from hpcsgd.comm.stats import CommStats
from hpcsgd.errors import JobError, in_one_line

Fact = tuple[str, str]
"""A name and its value here, such as "lr of param group 0", "0.1"."""
_noted: WeakKeyDictionary[CommStats, Sequence[Fact]] = WeakKeyDictionary()
"""The facts that a rank has noted, by its `CommStats`, which all communicators of the rank share."""


def note(world: Communicator, facts: Iterable[Fact]) -> None:
    """Note facts that the ranks of `world` will compare, and drop those noted before."""
    _noted[world.stats] = tuple(facts)


def noted(world: Communicator) -> Sequence[Fact]:
    """Return the facts that this rank has noted."""
    return _noted.get(world.stats, ())


def require_alike(world: Communicator, mine: Sequence[Fact]) -> None:
    """Raise the same `JobError` on every rank if the facts `mine` differ among ranks; collective."""
    if world.size == 1:
        return
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=16).digest()
    if len(set(world.gather_objects(digest))) > 1:
        found = difference(dict(enumerate(world.gather_objects(mine))))
        raise JobError(f"ranks {found}: give all ranks the same")


def difference(lists: Mapping[int, Sequence[Fact]], member: str = "rank") -> str:
    """Return one line about the first fact that differs between `lists`, which are not equal.

    `lists` has the facts of each `member` by its number.
    """
    tables = {number: dict(facts) for number, facts in lists.items()}
    for what in dict.fromkeys(what for facts in lists.values() for what, _ in facts):
        values = {number: table.get(what, "missing") for number, table in tables.items()}
        if len(set(values.values())) > 1:
            break
    else:  # the same facts in another order
        first, *others = lists.values()
        unlike = next(facts for facts in others if facts != first)
        moved = next(a for (a, _), (b, _) in zip(first, unlike, strict=True) if a != b)
        what = f"what comes before {moved}"
        values = {number: _before(moved, facts) for number, facts in lists.items()}
    one, *rest = values
    other = next(number for number in rest if values[number] != values[one])
    found = " and ".join(
        f"{value} on {_numbers(numbers, member)}" for value, numbers in _by_value(values)[:4]
    )
    return in_one_line(f"{one} and {other} differ: {what} is {found}")


def _before(what: str, facts: Sequence[Fact]) -> str:
    names = [name for name, _ in facts]
    place = names.index(what)
    return names[place - 1] if place else "nothing"


def _by_value(values: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    return [(x, [n for n, y in values.items() if y == x]) for x in dict.fromkeys(values.values())]


def _numbers(numbers: Sequence[int], member: str) -> str:
    shown = ", ".join(str(number) for number in numbers[:4])
    more = f" and {len(numbers) - 4} more" if len(numbers) > 4 else ""
    return f"{member}{'s' if len(numbers) > 1 else ''} {shown}{more}"
