from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcsgd.elastic.event_log import EventLog, Loss, read
from hpcsgd.errors import UserError


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def story(events: EventLog, clock: Clock) -> None:
    """Log every kind of event, one per second."""
    for tell in (
        lambda: events.started(replica_group=1, life="a", ranks=2),
        lambda: events.generation(generation=1, members=[1, 0], newcomers=[], rounds=0),
        lambda: events.units(unit="samples", units={1: 192, 0: 64}),
        lambda: events.commit(
            generation=1, rounds=1, members=(0, 1), counted=(0,), t=100, epoch=2, fraction=0.5
        ),
        lambda: events.lost(replica_group=1, why="its connection broke", kind=Loss.DIED),
        lambda: events.late(replica_group=0, why="it did not arrive"),
        lambda: events.ended(replica_group=1, life="a", code=-9),
        events.stopped,
        events.finished,
    ):
        tell()
        clock.now += 1


def test_events_read_back_as_reported_and_at_once(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "events.jsonl"
    events = EventLog(path)
    story(events, clock)
    told = read(path)
    assert list(told[2]["units"]) == [0, 1]
    assert [(event.pop("unix"), event.pop("at")) for event in told] == [(1000.0 + n, n) for n in range(9)]
    assert told == [
        {"event": "started", "replica_group": 1, "life": "a", "ranks": 2},
        {"event": "generation", "generation": 1, "members": [0, 1], "newcomers": [], "rounds": 0},
        {"event": "units", "unit": "samples", "units": {0: 64, 1: 192}},
        {
            "event": "commit",
            "generation": 1,
            "rounds": 1,
            "members": [0, 1],
            "counted": [0],
            "t": 100,
            "epoch": 2,
            "fraction": 0.5,
        },
        {"event": "lost", "replica_group": 1, "why": "its connection broke", "kind": "died"},
        {"event": "late", "replica_group": 0, "why": "it did not arrive"},
        {"event": "ended", "replica_group": 1, "life": "a", "code": -9},
        {"event": "stopped"},
        {"event": "finished"},
    ]
    events.close()


@pytest.mark.parametrize("torn", [b"", b'{"event": "star', b'{"event": "stopped", "unix": 1.0, "at": 1.0}'])
def test_a_later_writer_goes_on_where_the_last_one_was(tmp_path: Path, clock: Clock, torn: bytes) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as events:
        events.stopped()
    path.write_bytes(path.read_bytes() + torn)
    clock.now += 60
    with EventLog(path) as events:
        events.finished()
    assert read(path) == [
        {"event": "stopped", "unix": 1000.0, "at": 0.0},
        {"event": "finished", "unix": 1060.0, "at": 60.0},
    ]


def test_seconds_never_run_backwards(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "events.jsonl"
    for now in (1000.0, 1005.0, 990.0, 1008.0):
        clock.now = now
        with EventLog(path) as events:
            events.stopped()
    assert [(event["unix"], event["at"]) for event in read(path)] == [
        (1000, 0),
        (1005, 5),
        (990, 5),
        (1008, 8),
    ]


def test_a_writer_that_has_nothing_to_tell_leaves_an_empty_file(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl").close()
    assert read(tmp_path / "events.jsonl") == []


def test_how_a_group_was_lost_is_one_of_four(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as events, pytest.raises(ValueError, match="'asleep'"):
        events.lost(replica_group=0, why="", kind="asleep")  # type: ignore[arg-type]
    assert read(tmp_path / "events.jsonl") == []


@pytest.mark.parametrize(
    "damage",
    [
        b'{"eve',
        b"",
        b"\xff",
        b"[]",
        b"7",
        b'{"event": "stopped"}',
        b'{"unix": 1, "at": 0}',
        b'{"event": "stopped", "unix": 1, "at": "soon"}',
        b'{"event": "units", "unix": 1, "at": 0, "units": {"first": 3}}',
        b'{"event": "units", "unix": 1, "at": 0, "units": [3]}',
    ],
)
def test_damage_before_the_last_line_is_an_error_naming_the_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "events.jsonl"
    good = json.dumps({"event": "stopped", "unix": 1.0, "at": 0.0}).encode()
    path.write_bytes(b"\n".join([good, damage, good, b'{"half']))
    for use in (read, EventLog):
        with pytest.raises(UserError, match=r"events.jsonl:2: not an event of an event log"):
            use(path)
    path.write_bytes(b"\n".join([good, good, damage]))  # the last line is half written
    assert len(read(path)) == 2
