"""Find ranks that wait for each other, from the reports of all ranks about their own state.

A rank is blocked if all of its threads wait for other ranks. It reports for which operations, and how many
operations it has begun on each channel: on each communicator, and in each direction between two ranks. Rank r
waits for rank s if r needs the n-th operation of s on a channel, and s has reported fewer. A set of blocked
ranks is in a deadlock if every wait of every rank in it needs a rank of the set, or one which has left.

Ranks also wait in vain if an operation has the same number on all of them, but not the same kind.

The result is right even if reports are old. Suppose that some ranks of the set continued after their reports,
and let r be the first of them. Then r got what it needed from a rank s of the set, and s began that operation
after the report of s. A blocked rank begins nothing before it continues, so s continued before r did: a
contradiction.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from hpcsgd.comm.backend import PeerLost

SHOWN = 8
"""The largest number of ranks that a message lists."""
KEPT = 64
"""The number of recent calls of each channel that are kept, to be compared with those of other ranks."""
_REMEDY = "all ranks of a group have to make the same calls in the same order"


class Need(NamedTuple):
    """A condition: each of the world ranks `ranks` has begun operation `number` on `channel`."""

    channel: str
    number: int
    ranks: Sequence[int]


class Wait(NamedTuple):
    """An operation in progress, described by `text`, which ends when all of its needs are satisfied."""

    text: str
    needs: tuple[Need, ...]


class Call(NamedTuple):
    """A collective that a rank has begun: its number on its channel, its kind, and its description."""

    number: int
    what: str
    text: str


class Report(NamedTuple):
    """The state of one rank.

    `counts` has the number of operations that the rank has begun on each channel, `calls` its last
    collectives there. A later report may leave out channels that have not changed.
    """

    blocked: bool
    """True if the rank begins nothing before one of its `waits` ends. A rank that has left has no waits."""
    waits: tuple[Wait, ...] = ()
    counts: Mapping[str, int] = {}
    calls: Mapping[str, Sequence[Call]] = {}
    last: str | None = None
    """The last activity of a rank that has left or is leaving, as text; None while the rank works."""

    @property
    def has_left(self) -> bool:
        """True if the rank begins nothing more."""
        return self.blocked and not self.waits


class Deadlock(PeerLost):
    """Ranks wait for each other, or for a rank that has left. `ranks` lists the waiting ones."""


class Reports(Protocol):
    """A receiver of the reports of all ranks of one world. Reports of one rank stay in order."""

    def add(self, rank: int, report: Report) -> None: ...

    def check(self) -> None:
        """Raise `Deadlock` if one was found and the ranks have to end themselves."""
        ...

    def missing(self, needs: Sequence[Need]) -> list[int]:
        """Return the ranks that are not known to have satisfied all of `needs`."""
        ...


class Table:
    """The latest report of each rank of a world; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: dict[int, Report] = {}
        self._counts: dict[int, dict[str, int]] = {}
        self._calls: dict[str, dict[int, tuple[int, Call]]] = {}
        self.deadlock: Deadlock | None = None

    def add(self, rank: int, report: Report) -> None:
        """Replace the report of `rank`, and look for a deadlock if it is blocked."""
        with self._lock:
            self._reports[rank] = report
            self._counts.setdefault(rank, {}).update(report.counts)
            if report.blocked and self.deadlock is None:
                self.deadlock = self._mismatch(rank, report) or self._found()

    def check(self) -> None:
        """Raise `Deadlock` if `add` has found a deadlock."""
        if self.deadlock is not None:
            raise Deadlock(str(self.deadlock), self.deadlock.ranks)

    def missing(self, needs: Sequence[Need]) -> list[int]:
        """Return the ranks that have not reported that they satisfied all of `needs`."""
        with self._lock:
            return sorted({rank for need in needs for rank in need.ranks if self._misses(need, rank)})

    def left(self) -> int:
        """Return the number of ranks that have left."""
        with self._lock:
            return sum(report.has_left for report in self._reports.values())

    def _misses(self, need: Need, rank: int) -> bool:
        return self._counts.get(rank, {}).get(need.channel, 0) < need.number

    def _mismatch(self, rank: int, report: Report) -> Deadlock | None:
        """Return a deadlock if a call of `rank` differs from the one with the same number on another rank."""
        for channel, calls in report.calls.items():
            known = self._calls.setdefault(channel, {})
            for call in calls:
                other, theirs = known.setdefault(call.number, (rank, call))
                if theirs.what != call.what:
                    both = f"rank {rank} began {call.text}, rank {other} began {theirs.text}"
                    return Deadlock(f"ranks make different calls: {both}: {_REMEDY}", (other, rank))
            while len(known) > KEPT:
                del known[next(iter(known))]
        return None

    def _found(self) -> Deadlock | None:
        held = {rank for rank, report in self._reports.items() if report.blocked}
        while True:
            missing = self._missing_of(held)
            freed = {
                rank
                for rank in held
                if any(not any(missing[need] for need in wait.needs) for wait in self._reports[rank].waits)
            }
            if not freed:
                break
            held -= freed
        waiting = sorted(rank for rank in held if self._reports[rank].waits)
        if not waiting:
            return None
        awaited = {
            rank: sorted({s for need in self._reports[rank].waits[0].needs for s in missing[need]})
            for rank in waiting
        }
        return Deadlock(_line(awaited, self._reports), waiting)

    def _missing_of(self, held: set[int]) -> dict[Need, list[int]]:
        """Return for each need of the ranks `held` which of the ranks `held` have not satisfied it."""
        needs = {need for rank in held for wait in self._reports[rank].waits for need in wait.needs}
        return {need: [s for s in need.ranks if s in held and self._misses(need, s)] for need in needs}


def _line(awaited: Mapping[int, Sequence[int]], reports: Mapping[int, Report]) -> str:
    """Return the message of a deadlock; `awaited` has for each waiting rank the ranks that it waits for."""
    for rank in sorted(awaited, key=lambda rank: reports[rank].last is not None):
        if gone := [s for s in awaited[rank] if reports[s].last is not None]:
            return _left(rank, gone, awaited, reports)
    cycle = _cycle(awaited)
    texts: dict[str, list[int]] = {}
    for rank in cycle:
        texts.setdefault(reports[rank].waits[0].text, []).append(rank)
    first, *others = [
        (names(sorted(ranks)), "is" if len(ranks) == 1 else "are", text) for text, ranks in texts.items()
    ]
    waits = [" ".join((first[0], first[1], "in", first[2])), *(f"{who} in {text}" for who, _, text in others)]
    return f"ranks wait for each other: {', '.join(waits)}: {_REMEDY}"


def _left(
    rank: int, gone: Sequence[int], awaited: Mapping[int, Sequence[int]], reports: Mapping[int, Report]
) -> str:
    text = reports[rank].waits[0].text
    waiting = [
        r
        for r, others in awaited.items()
        if reports[r].waits[0].text == text and not set(gone).isdisjoint(others)
    ]
    last = reports[gone[0]].last
    after = f" after {last}" if last else ""
    have, them = ("has", "it") if len(gone) == 1 else ("have", "them")
    return (
        f"{names(gone)} {have} left{after}, and {names(waiting)} wait{'s' * (len(waiting) == 1)} for {them} "
        f"in {text}: all ranks need the same number of batches, and the same calls"
    )


def _cycle(awaited: Mapping[int, Sequence[int]]) -> list[int]:
    """Return a cycle of ranks, the lowest first: each waits for the next, and the last for the first."""
    path: list[int] = []
    rank = min(awaited)
    while rank not in path:
        path.append(rank)
        rank = awaited[rank][0]
    cycle = path[path.index(rank) :]
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]


def names(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > SHOWN:
        return f"ranks {', '.join(map(str, ranks[:SHOWN]))} and {len(ranks) - SHOWN} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
