"""Measure each operation on each communicator of a job, with and without the communication thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hpcsgd.comm import Communicator
from hpcsgd.cost.fit import fits
from hpcsgd.cost.links import Link, Points
from hpcsgd.performance.measuring.layout import MeasuredLink
from hpcsgd.performance.measuring.operations import BYTES, Room, bare, elements_of, on_comm_thread
from hpcsgd.performance.measuring.timing import Barriers, Contest, feasible, take_turns

SMALLEST = 8
STEP = 4
LEAST_SHARE = 0.5
"""The time for each operation is at least this fraction of (all seconds / number of operations)."""


@dataclass(frozen=True)
class Series:
    """The measured times of one operation on one communicator."""

    points: Points
    scatter: tuple[float, ...]
    """For each point, the interquartile range of its repeated times, as a share of their median."""
    alone: bool
    """True if all other ranks were idle."""


def sizes(max_bytes: int) -> list[int]:
    """Return the message sizes 8, 32, 128, …, `max_bytes`, in bytes."""
    found = [SMALLEST]
    while found[-1] * STEP < max_bytes:
        found.append(found[-1] * STEP)
    return [*found, max_bytes]


def measure(world: Communicator, found: list[MeasuredLink], max_bytes: int, seconds: float) -> list[Series]:
    """Return the times of all operations on the communicators `found`, the same on all ranks. Collective.

    This takes about `seconds`. While a pair is measured, the other ranks wait as in training.
    """
    together = Barriers(world)
    room = Room(elements_of(max_bytes, world.size))
    measured: list[Series] = []
    left, operations = seconds, sum(len(course.operations) for course in found)
    least = LEAST_SHARE * seconds / max(operations, 1)
    for course in found:
        budget = max(left / operations, least)
        timed = _timed(world, course, max_bytes, budget, together, room)
        left -= sum(contest.spent for contests in timed.values() for contest in contests)
        operations -= len(timed)
        measured += [_series(operation, course, contests) for operation, contests in timed.items()]
    return measured


def _timed(
    world: Communicator, course: MeasuredLink, max_bytes: int, budget: float, together: Barriers, room: Room
) -> dict[str, list[Contest]]:
    """Time each operation of `course` on its communicator; return a `Contest` for each message size.

    A `Contest` has the times with and without the communication thread. The timing takes about `budget`
    seconds per operation. Sizes that are too large for that are left out.
    """
    comm = course.open(world)
    timed: dict[str, list[Contest]] = {}
    for operation in course.operations:
        contests = [
            Contest(elements * BYTES, _calls(course, operation, comm, elements, room, world.rank))
            for elements in _elements(max_bytes, course.link_class.ranks)
        ]
        timed[operation] = feasible(together, contests, budget)
    everything = [contest for contests in timed.values() for contest in contests]
    take_turns(together, everything, budget * len(timed))
    return timed


def _elements(max_bytes: int, p: int) -> list[int]:
    return sorted({elements_of(nbytes, p) for nbytes in sizes(max_bytes)})


def _calls(
    course: MeasuredLink, operation: str, comm: Communicator, elements: int, room: Room, rank: int
) -> list[Callable[[], Any]]:
    if course.part == "pair" and rank not in course.members:
        return [lambda: None, lambda: None]
    return [on_comm_thread(operation, comm, elements, room), bare(operation, comm, elements, room)]


def _series(operation: str, course: MeasuredLink, timed: list[Contest]) -> Series:
    way = course.link_class
    comm_thread, library = ([contest.timed[place].median for contest in timed] for place in (0, 1))
    points = Points(
        operation=operation,
        ranks=way.ranks,
        hosts=way.hosts,
        at_once=way.at_once,
        bytes=tuple(contest.nbytes for contest in timed),
        seconds=tuple(_rounded(each) for each in comm_thread),
        bare_seconds=tuple(_rounded(each) for each in library),
    )
    scatter = tuple(contest.timed[0].scatter for contest in timed)
    return Series(points, scatter, alone=course.part == "pair")


def links(measured: list[Series]) -> Iterator[Link]:
    """Yield a `Link` for each operation, kind of communicator and number of ranks.

    Each number of ranks is fitted separately, because more ranks also send other messages. The times of a
    pair that was measured alone count only if there are no others, because in a job all ranks are busy.
    """

    def kind(series: Series) -> tuple[str, str]:
        return series.points.operation, series.points.kind

    in_company = {kind(each) for each in measured if not each.alone}
    counted = [each.points for each in measured if not each.alone or kind(each) not in in_company]
    yield from fits(counted)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")
