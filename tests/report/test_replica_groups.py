"""The summary of an event log: which groups were members when, their progress, and counts of events."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsgd.elastic.event_log import Event, EventLog, Loss, read
from hpcsgd.report.replica_groups import RETURNED, numbers, tell


def happened(*events: tuple) -> list[Event]:
    """Return the events of tuples (at, event, fields)."""
    return [{"event": event, "unix": 1e9 + at, "at": at, **fields} for at, event, fields in events]


def members(at: float, *replica_groups: int) -> tuple:
    return at, "generation", {"generation": 1, "members": list(replica_groups), "newcomers": [], "rounds": 0}


def committed(at: float, epochs: float, *replica_groups: int) -> tuple:
    progress = {"t": 1, "epoch": int(epochs), "fraction": epochs % 1}
    return at, "commit", {"generation": 1, "rounds": 1, "members": list(replica_groups), **progress}


def lost(at: float, replica_group: int, kind: Loss = Loss.DIED) -> tuple:
    return at, "lost", {"replica_group": replica_group, "why": "", "kind": str(kind)}


def late(at: float, replica_group: int) -> tuple:
    return at, "late", {"replica_group": replica_group, "why": ""}


def given(at: float, **units: int) -> tuple:
    return (
        at,
        "units",
        {"unit": "samples", "units": {int(replica_group[1:]): x for replica_group, x in units.items()}},
    )


STORY = happened(
    (0, "started", {"replica_group": 0, "life": "a", "ranks": 2}),
    members(2, 0, 1),
    given(2, i0=128, i1=128),
    committed(5, 0.5, 0, 1),
    lost(7, 0),
    (7, "ended", {"replica_group": 0, "life": "a", "code": -9}),
    members(8, 1),
    given(8, i1=256),
    committed(9, 1, 1),
    members(10, 0, 1),
    given(10, i0=128, i1=128),
    committed(12, 1.5, 0, 1),
    (12, "finished", {}),
)


def test_a_line_is_there_while_its_group_is_a_member() -> None:
    timeline = tell(STORY)
    assert dict(timeline.lines) == {
        0: [[(2, 0), (5, 0.5), (7, 0.5)], [(10, 1), (12, 1.5), (12, 1.5)]],
        1: [[(2, 0), (5, 0.5), (9, 1), (12, 1.5), (12, 1.5)]],
    }
    assert dict(timeline.marks) == {"died": [(0, (7, 0.5))], RETURNED: [(0, (10, 1))]}
    assert timeline.end == 12


def test_a_run_that_is_still_going_on_is_shown_as_far_as_it_is() -> None:
    timeline = tell(happened(members(0, 0, 1), committed(3, 0.25, 0, 1), (4, "ended", {})))
    assert timeline.lines[0] == timeline.lines[1] == [[(0, 0), (3, 0.25), (4, 0.25)]]


def test_who_is_no_longer_a_member_ends_without_a_mark_where_nothing_says_why() -> None:
    timeline = tell(happened(members(0, 0, 1), committed(3, 1, 1)))
    assert timeline.lines[0] == [[(0, 0), (3, 0)]]
    assert not timeline.marks


def test_an_group_is_lost_once() -> None:
    timeline = tell(happened(members(0, 0, 1), lost(1, 0, Loss.CUT), lost(2, 0), lost(2, 7), members(3, 1)))
    assert dict(timeline.marks) == {"cut": [(0, (1, 0))]}


def test_a_late_group_is_no_member_and_may_be_lost_later() -> None:
    events = happened(
        members(0, 0, 1), late(1, 0), members(1, 1), lost(4, 0, Loss.LATE), members(5, 0, 1), late(6, 0)
    )
    timeline = tell(events)
    assert dict(timeline.marks) == {"late": [(0, (1, 0)), (0, (6, 0))], RETURNED: [(0, (5, 0))]}
    assert timeline.lines[0] == [[(0, 0), (1, 0)], [(5, 0), (6, 0)]]


def test_the_first_and_those_after_a_stop_do_not_return() -> None:
    events = happened(
        members(0, 0, 1), lost(1, 0), (2, "stopped", {}), members(50, 0, 1), members(60, 0, 1, 2)
    )
    timeline = tell(events)
    assert timeline.lines[1] == [[(0, 0), (2, 0)], [(50, 0), (60, 0)]]
    assert timeline.marks[RETURNED] == [(2, (60, 0))]


def test_who_alone_is_left_and_comes_back_returns() -> None:
    timeline = tell(happened(members(0, 0), lost(1, 0, Loss.SILENT), members(2, 0)))
    assert {kind: len(places) for kind, places in timeline.marks.items()} == {"silent": 1, RETURNED: 1}


def test_all_members_have_one_progress() -> None:
    assert tell(STORY).progress == [(2, 0), (5, 0.5), (7, 0.5), (9, 1), (10, 1), (12, 1.5)]


@pytest.mark.parametrize("events", [[], happened((0, "started", {"replica_group": 0}), (1, "stopped", {}))])
def test_where_nobody_averaged_there_is_nothing_to_tell(events: list[Event]) -> None:
    timeline = tell(events)
    assert not timeline.lines
    assert not timeline.marks
    assert not timeline.units
    assert timeline.progress == []


def test_groups_are_those_that_averaged_or_were_given_something() -> None:
    assert tell(happened(members(0, 2), given(1, i0=4))).replica_groups == [0, 2]


def test_what_happened_is_counted(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as events:
        events.generation(generation=1, members=[0, 1], newcomers=[], rounds=0)
        events.commit(generation=1, rounds=1, members=[0, 1], counted=[0, 1], t=10, epoch=2, fraction=0.0)
        for kind in Loss:
            events.lost(replica_group=1, why="", kind=kind)
            events.generation(generation=2, members=[0, 1], newcomers=[1], rounds=1)
        events.late(replica_group=1, why="")
        events.finished()
    counts = {"rounds": 1, "groups_lost": 4, "groups_returned": 5, "groups_left": 1, "groups_late": 1}
    found = read(tmp_path / "events.jsonl")
    assert numbers(found, 60, 2.0) == {"samples": 60, "samples_per_s": 30.0, **counts}
    assert numbers(found, 60, 0.0)["samples_per_s"] is None
    assert numbers([], None, 2.0) == {}, "a run of one world"
