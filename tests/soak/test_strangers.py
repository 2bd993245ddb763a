"""A coordinator and the listeners of ranks that strangers connect to.

They continue to run and use little memory, and honest groups complete their rounds.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elastic.conftest import HEARTBEAT_TIMEOUT, TOKEN, Desk, desk, wait_for
from hpcsgd.elastic import ring
from hpcsgd.elastic.client import Client
from hpcsgd.elastic.handshake import GREETING, RING
from hpcsgd.elastic.register import Register, Vote
from soak.conftest import Seeds
from soak.sizes import cases
from soak.strangers import KINDS, Stranger, knocks, overheard, replays, says_nothing

__all__ = ["desk"]
ROOM = 24 << 20
"""Bytes that strangers may cost, including what allocators keep."""
FLOOD = 400
"""The number of simultaneous connections, and of files that the process may open."""


@dataclass
class Host:
    """A coordinator in a process of its own, seen from outside."""

    address: str
    pid: int

    @property
    def place(self) -> tuple[str, int]:
        name, port = self.address.rsplit(":", 1)
        return name, int(port)

    def bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@dataclass
class Rounds:
    """Groups of one rank each that vote for one round after another."""

    clients: list[Client]
    made: int = 0
    failed: list[BaseException] = field(default_factory=list)
    generations: set[int] = field(default_factory=set)
    last: float = float("inf")
    """The round after which all groups stop, because a round needs the votes of all."""

    def make(self, client: Client) -> None:
        try:
            now = client.come("nowhere:1", 0)
            while now.rounds < self.last:
                now = self._next(client, now)
        except BaseException as error:  # noqa: BLE001 - `go_on` reports it
            self.failed.append(error)

    def _next(self, client: Client, now: Register) -> Register:
        after = client.vote(now.generation, now.rounds, Vote(leaving=False))
        assert (after.generation, after.rounds) == (now.generation, now.rounds + 1)
        self.generations.add(after.generation)
        self.made = max(self.made, after.rounds)
        return after

    def go_on(self) -> None:
        """Wait until two more rounds are complete."""
        until = self.made + 2
        wait_for(lambda: self.made >= until or self.failed)
        assert not self.failed, self.failed


@contextmanager
def rounds_of(*clients: Client) -> Iterator[Rounds]:
    rounds = Rounds(list(clients))
    threads = [threading.Thread(target=rounds.make, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield rounds
    finally:
        rounds.last = rounds.made + 3
        for thread in threads:
            thread.join(1 if rounds.failed else 60)


@contextmanager
def in_peace(desk: Desk) -> Iterator[tuple[Host, Rounds, bytes]]:
    """A coordinator with two groups that complete rounds, and the first message of a client."""
    with desk.killable(2) as address:
        host = Host(address, desk.pid)
        with rounds_of(desk.client(address, 0), desk.client(address, 1)) as rounds:
            rounds.go_on()
            yield host, rounds, overheard(host.place, TOKEN)


def require_unharmed(desk: Desk, rounds: Rounds) -> None:
    rounds.go_on()
    assert rounds.generations == {1}
    assert not [event for event in desk.events() if event["event"] == "lost"]


@pytest.mark.slow
@cases(some=15, every=1000)
def test_rounds_go_on_whatever_strangers_do(desk: Desk, seeds: Seeds, cases: int) -> None:
    with in_peace(desk) as (host, rounds, recorded), ExitStack() as held:
        kinds: tuple[Stranger, ...] = (*KINDS, replays(recorded))
        for kind in kinds:  # lets allocations and lazy imports that happen only once happen now
            held.enter_context(knocks(host.place, kind, random.Random(0)))
        rounds.go_on()
        before = host.bytes()

        def case(seed: int) -> None:
            chance = random.Random(f"stranger {seed}")
            for _ in range(chance.choice([1, 1, 5])):
                door = knocks(host.place, chance.choice(kinds), chance)
                held.callback(door.close) if chance.random() < 0.2 else door.close()
            if seed % 10 == 0:
                rounds.go_on()

        seeds.each(cases, case)
        assert host.bytes() < before + ROOM
        require_unharmed(desk, rounds)


@pytest.mark.slow
def test_nobody_hears_anything_who_does_not_know_the_token(desk: Desk) -> None:
    """A stranger receives a challenge at most."""
    with in_peace(desk) as (host, rounds, recorded):
        for kind in (*KINDS, replays(recorded)):
            if kind is says_nothing:
                continue
            with knocks(host.place, kind, random.Random(1)) as door:
                heard = b""
                try:
                    door.shutdown(socket.SHUT_WR)
                    while more := door.recv(4096):
                        heard += more
                except OSError:
                    pass
            assert len(heard) <= 32, kind
        require_unharmed(desk, rounds)


@pytest.mark.slow
def test_a_flood_leaves_room_for_the_honest(desk: Desk) -> None:
    """Newcomers are admitted even if the process may open few files: it closes silent connections."""
    with in_peace(desk) as (host, rounds, _):
        resource.prlimit(host.pid, resource.RLIMIT_NOFILE, (FLOOD, FLOOD))
        usual = host.files()
        with ExitStack() as flood:
            for _ in range(FLOOD):
                flood.enter_context(knocks(host.place, says_nothing, random.Random(0)))
            wait_for(lambda: host.files() <= usual + FLOOD // 2 + 2)
            asked = time.monotonic()
            newcomer = desk.client(host.address, 2)
            assert time.monotonic() - asked < GREETING, "nobody had to give up before"
            assert newcomer.register.replica_groups == (0, 1)
            rounds.go_on()
        wait_for(lambda: host.files() <= usual + 1)
        assert not rounds.failed


def door_address(door: ring.Listener) -> tuple[str, int]:
    name, port = door.address.rsplit(":", 1)
    return name, int(port)


def neighbour(door: ring.Listener) -> socket.socket:
    """Return a connection of an honest neighbor to the listener."""
    connection = socket.create_connection(door_address(door), timeout=30)
    ring.introduce(connection, TOKEN, RING)
    connection.sendall(b'{"generation": 1, "shard": 0}'.ljust(ring._LINE))
    return connection


def test_a_door_with_strangers_before_it_opens_to_neighbours() -> None:
    door = ring.Listener("127.0.0.1", TOKEN)
    before = threading.active_count()
    with ExitStack() as held:
        for seed in range(3 * ring._AT_THE_DOOR):
            chance = random.Random(seed)
            kind = chance.choice(KINDS) if seed % 3 else says_nothing
            held.enter_context(knocks(door_address(door), kind, chance))
        wait_for(lambda: threading.active_count() <= before + ring._AT_THE_DOOR)
        held.enter_context(neighbour(door))
        left = door.wait_for(1, 0, lambda _: False, lambda: False)
        left.close()
    door.close()
    wait_for(lambda: threading.active_count() < before)


class OnceFull:
    """A listening socket of a process that temporarily has too many open files."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self.failures = listener, 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def shutdown(self, how: int) -> None:
        self._listener.shutdown(how)

    def close(self) -> None:
        self._listener.close()


def test_a_door_that_could_not_be_opened_once_is_no_wall() -> None:
    door = ring.Listener("127.0.0.1", TOKEN)
    full = OnceFull(door._listener)
    door._listener = full  # pyright: ignore[reportAttributeAccessIssue]
    socket.create_connection(door_address(door)).close()  # the one that `accept` was waiting for
    wait_for(lambda: full.failures == 0)
    with neighbour(door):
        door.wait_for(1, 0, lambda _: False, lambda: False).close()
    door.close()


def test_who_says_one_byte_at_a_time_is_not_listened_to_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit of a greeting applies to the whole greeting, not to each byte."""
    monkeypatch.setattr(ring, "GREETING", 0.5)
    door = ring.Listener("127.0.0.1", TOKEN)
    with socket.create_connection(door_address(door), timeout=30) as slow:
        slow.recv(32)
        for _ in range(64):
            try:
                slow.sendall(b"x")
                slow.settimeout(0.05)
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            raise AssertionError("it is listened to")
    door.close()


def test_silence_of_the_honest_is_longer_than_these_tests() -> None:
    assert HEARTBEAT_TIMEOUT > 300
