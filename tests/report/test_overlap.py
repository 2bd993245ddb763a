from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsgd.comm.events import MESSAGE, WAIT, Event
from hpcsgd.report.overlap import Interval, length, overlap, union, without
from hpcsgd.report.trace import Window

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda x: (x[0], x[0] + x[1])))


def seconds(intervals: list[Interval]) -> set[int]:
    return {i for start, end in intervals for i in range(int(start), int(end))}


@given(INTERVALS, INTERVALS)
def test_sets_of_times(some: list[Interval], others: list[Interval]) -> None:
    a, b = union(some), union(others)
    assert seconds(a) == seconds(some)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(a))
    assert seconds(without(a, b)) == seconds(some) - seconds(others)
    assert length(without(a, b)) == len(seconds(some) - seconds(others))


OWNER, COMM_THREAD, SECOND = 1, 2, 3


def event(kind: str, phase: str, thread: int, start: float, end: float, name: str = "allreduce") -> Event:
    return Event(kind, name, phase, thread, start, end)


@pytest.mark.parametrize(
    ("events", "exposed", "hidden"),
    [
        ([event(MESSAGE, "g", COMM_THREAD, 1, 4), event(WAIT, "g", OWNER, 3, 5)], {"g": 2}, {"g": 2}),
        # Two busy communication threads hide a second once; a wait in any phase is no hidden time.
        ([event(MESSAGE, "g", COMM_THREAD, 1, 4), event(MESSAGE, "g", SECOND, 2, 5)], {}, {"g": 4}),
        ([event(MESSAGE, "g", COMM_THREAD, 1, 4), event(WAIT, "a", OWNER, 2, 3)], {"a": 1}, {"g": 2}),
        # Messages that begin before or end after the window count only inside it.
        ([event(MESSAGE, "g", COMM_THREAD, -3, 2), event(WAIT, "g", OWNER, 9, 12)], {"g": 1}, {"g": 2}),
        # Not counted: waits of other threads, `recv`, and messages that the owner's own thread sends.
        ([event(WAIT, "g", COMM_THREAD, 1, 4), event(MESSAGE, "g", COMM_THREAD, 1, 4, "recv")], {}, {}),
        ([event(MESSAGE, "g", OWNER, 1, 4)], {}, {}),
    ],
)
def test_what_counts_as_what(
    events: list[Event], exposed: dict[str, float], hidden: dict[str, float]
) -> None:
    assert overlap(Window(0, 10, 1, events), OWNER) == {"exposed": exposed, "hidden": hidden}
