"""A timeout counts only time in which the process listened; these tests move the clock."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elastic.conftest import TOKEN, Desk, wait_for
from hpcsgd.elastic.client import Client
from hpcsgd.elastic.handshake import COORDINATOR, introduce, welcome
from hpcsgd.elastic.register import Phase, Register
from hpcsgd.elastic.watch import Watch

HEARTBEAT_TIMEOUT = 1.0
HELLO = {"replica_group": 0, "rank": 0, "ranks": 1, "life": "first"}


class Clock:
    """A replacement of the module `time`."""

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.now

    def move(self, seconds: float) -> None:
        """Advance the clock, and wait until its users have seen that and have reacted."""
        self.now += seconds
        enough = self.looks + 3
        wait_for(lambda: self.looks >= enough, 60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("hpcsgd.elastic.watch.time", clock)
    return clock


def test_what_was_slept_through_counts_little(clock: Clock) -> None:
    watch = Watch(2.0)
    seconds = []
    for gap in (0.0, 1.5, 100.0, 0.5):
        clock.now += gap
        seconds.append(watch.look())
    assert seconds == [0.0, 1.5, 3.5, 4.0]


class ScriptedClient:
    """A client that sends only what the test sends."""

    def __init__(self, address: str, replica_group: int = 0) -> None:
        host, port = address.rsplit(":", 1)
        self.connection = socket.create_connection((host, int(port)), 60)
        introduce(self.connection, TOKEN, COORDINATOR)
        self.say({**HELLO, "replica_group": replica_group})
        self._lines = self.connection.makefile("r")
        self.hear("register")

    def say(self, message: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, what: str) -> Any:
        """Return the next message that has this key."""
        return next(said[what] for said in map(json.loads, self._lines) if what in said)

    def close(self) -> None:
        self._lines.close()
        self.connection.close()


def test_a_coordinator_that_was_held_up_loses_nobody(desk: Desk, clock: Clock) -> None:
    """Its process or machine was stopped, and it has yet to read what others sent meanwhile."""
    with desk.coordinator(1, heartbeat_timeout=HEARTBEAT_TIMEOUT) as at:
        client = ScriptedClient(at.address)
        for _ in range(3):
            clock.move(1000)
            client.say({"do": "beat"})
            assert client.hear("beat")
        client.close()
    assert "nothing was heard" not in str(desk.events())


@pytest.mark.slow
def test_who_gave_up_on_a_coordinator_that_was_held_up_may_come_back(desk: Desk, clock: Clock) -> None:
    with desk.coordinator(2, heartbeat_timeout=HEARTBEAT_TIMEOUT) as at:
        clients = [ScriptedClient(at.address, replica_group) for replica_group in (0, 1)]
        for client in clients:
            client.say({"do": "come", "address": "nowhere:1", "rounds": 0, "brings": False, "generation": 0})
        wait_for(lambda: at.register.phase is Phase.RUN, 60)
        clock.now += 1000
        for client in clients:
            client.close()
        wait_for(lambda: not at._clients, 60)
        back = ScriptedClient(at.address, 0)
        for _ in range(10):
            clock.move(HEARTBEAT_TIMEOUT / 5)
            back.say({"do": "beat"})
            assert back.hear("beat")
        back.close()
        wait_for(lambda: not at._clients, 60)
    lost = [(event["replica_group"], event["why"]) for event in desk.events() if event["event"] == "lost"]
    assert lost == [(1, "it did not come back"), (0, "its connection broke")]


@pytest.mark.slow
def test_only_who_is_silent_is_lost(desk: Desk, clock: Clock) -> None:
    with desk.coordinator(1, heartbeat_timeout=HEARTBEAT_TIMEOUT) as at:
        client = ScriptedClient(at.address)
        for _ in range(10):
            clock.move(HEARTBEAT_TIMEOUT / 5)
            client.say({"do": "beat"})
            assert client.hear("beat")
        for _ in range(6):
            clock.move(HEARTBEAT_TIMEOUT / 5)
        assert client.hear("evicted") == "nothing was heard of rank 0 for 1 s"
        client.close()


@pytest.fixture
def mute() -> Iterator[tuple[str, list[socket.socket]]]:
    """Yield the address of a coordinator that sends only the register, and a list of its connections."""
    came: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def converse() -> None:
        while True:
            try:
                connection, _ = listener.accept()
                welcome(connection, TOKEN, COORDINATOR)
                connection.sendall(json.dumps({"register": Register().to_json()}).encode() + b"\n")
            except OSError:
                return
            came.append(connection)

    thread = threading.Thread(target=converse)
    thread.start()
    yield "{}:{}".format(*listener.getsockname()), came
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    for closing in (listener, *came):
        closing.close()


@pytest.mark.slow
def test_a_seat_that_was_held_up_waits_for_an_answer(
    mute: tuple[str, list[socket.socket]], clock: Clock
) -> None:
    address, came = mute
    client = Client(
        address, TOKEN, HELLO, heartbeat_timeout=HEARTBEAT_TIMEOUT, patience=60, on_change=lambda _: None
    )
    clock.move(1000)
    assert len(came) == 1, "it has not connected again"

    def silent_for_long() -> bool:
        clock.now += HEARTBEAT_TIMEOUT / 3
        return len(came) == 2

    wait_for(silent_for_long, 60)
    client.close()
