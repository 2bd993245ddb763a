"""Clients that do not know the token. Each opens one connection, which stays open until it is closed."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

from hpcsgd.elastic.handshake import CHALLENGE, COORDINATOR, PROOF, RING, introduce, place, proof

Stranger = Callable[[socket.socket, random.Random], None]
HELLO = json.dumps({"replica_group": 0, "rank": 0, "ranks": 1, "life": "stranger"}).encode() + b"\n"


def says_nothing(_: socket.socket, chance: random.Random) -> None:
    """Send nothing."""


def says_anything(door: socket.socket, chance: random.Random) -> None:
    door.sendall(chance.randbytes(chance.choice([1, CHALLENGE, CHALLENGE + PROOF, 1000, 100_000])))


def says_json(door: socket.socket, chance: random.Random) -> None:
    door.sendall(chance.choice([HELLO, b'{"do": "beat"}\n', b"[" * 100_000, b"null\n" * 1000]))


def stops_halfway(door: socket.socket, chance: random.Random) -> None:
    door.recv(CHALLENGE)
    door.sendall(chance.randbytes(chance.randrange(1, CHALLENGE + PROOF)))


def never_ends_its_line(door: socket.socket, chance: random.Random) -> None:
    for _ in range(chance.choice([1, 64])):
        door.sendall(b"a" * 65536)


def guesses(door: socket.socket, chance: random.Random) -> None:
    host, client = door.recv(CHALLENGE), chance.randbytes(CHALLENGE)
    at = place(chance.choice([COORDINATOR, RING]), door.getsockname(), door.getpeername())
    door.sendall(client + proof(chance.choice(["", "guess"]), "client", at, host, client) + HELLO)


def answers_with_the_question(door: socket.socket, chance: random.Random) -> None:
    """Send the host's own challenge back to it: it must not accept this as a proof."""
    host = door.recv(CHALLENGE)
    door.sendall(host + host + HELLO)


def breaks_off(door: socket.socket, chance: random.Random) -> None:
    """Reset the connection, at once or in the middle of the greeting."""
    if chance.random() < 0.5:
        door.sendall(chance.randbytes(CHALLENGE))
    door.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    door.close()


KINDS: tuple[Stranger, ...] = (
    says_nothing, says_anything, says_json, stops_halfway, never_ends_its_line, guesses,
    answers_with_the_question, breaks_off,
)  # fmt: skip


def replays(recorded: bytes) -> Stranger:
    """Return a stranger that sends again what an honest client has sent."""

    def stranger(door: socket.socket, chance: random.Random) -> None:
        door.sendall(recorded[: chance.choice([len(recorded), CHALLENGE + PROOF])])

    return stranger


def knocks(address: tuple[str, int], kind: Stranger, chance: random.Random) -> socket.socket:
    """Return a new connection on which a stranger has sent its data, unless the host closed it earlier."""
    door = socket.create_connection(address, timeout=30)
    with suppress(OSError):
        kind(door, chance)
    return door


class Overheard:
    """An honest client's end of a connection that records what the client sends."""

    def __init__(self, connection: socket.socket) -> None:
        self.said = b""
        self._connection = connection
        self.recv, self.settimeout = connection.recv, connection.settimeout
        self.getsockname, self.getpeername = connection.getsockname, connection.getpeername

    def sendall(self, data: bytes) -> None:
        self.said += data
        self._connection.sendall(data)


def overheard(host: tuple[str, int], token: str) -> bytes:
    """Return what a client that knows the token sends."""
    with socket.create_connection(host, timeout=30) as connection:
        client = Overheard(connection)
        introduce(client, token, COORDINATOR)  # pyright: ignore[reportArgumentType]
        return client.said + HELLO
