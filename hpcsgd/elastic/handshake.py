"""Both ends of a connection prove that they know the job's token before anything else is said.

The token itself never travels: each end answers the other's challenge with a keyed hash of both challenges
and of the connection: which door it is, and the addresses and ports of its two ends as this end sees them. So
an answer is good for nobody who passes it on by another connection. Addresses that are translated on the way
make honest ends differ; there are none in a cluster's network.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

COORDINATOR, RING = "coordinator", "ring"
"""Doors."""
CHALLENGE = 32
PROOF = 32
GREETING = 10.0
"""Seconds that a client may take to introduce itself."""


class Unwelcome(ConnectionError):
    """Whoever is at the other end does not know the token."""


def challenge() -> bytes:
    return secrets.token_bytes(CHALLENGE)


def place(door: str, client: object, host: object) -> bytes:
    """Of a connection, from the `client`'s address to that of the `host`, whose `door` it is."""
    return repr((door, client, host)).encode()


def proof(token: str, who: str, at: bytes, host: bytes, client: bytes) -> bytes:
    """Of `who`, "host" or "client", for the challenges of both, `at` that place."""
    return hmac.digest(token.encode(), who.encode() + host + client + at, "sha256")


def require(token: str, who: str, at: bytes, host: bytes, client: bytes, given: bytes) -> None:
    """Raises `Unwelcome` unless `given` is their proof."""
    if not hmac.compare_digest(given, proof(token, who, at, host, client)):
        raise Unwelcome(f"the {who} of a connection does not know this job's token, or has passed on a proof")


def introduce(connection: socket.socket, token: str, door: str) -> None:
    """The client's part. Raises `Unwelcome`, or another `OSError` where the other end is gone."""
    at = place(door, connection.getsockname(), connection.getpeername())
    host, client = read(connection, CHALLENGE), challenge()
    connection.sendall(client + proof(token, "client", at, host, client))
    require(token, "host", at, host, client, read(connection, PROOF))


def welcome(connection: socket.socket, token: str, door: str, until: float | None = None) -> None:
    """The host's part, up to a moment on the clock `time.monotonic`; raises as `introduce` does."""
    at = place(door, connection.getpeername(), connection.getsockname())
    host = challenge()
    connection.sendall(host)
    client = read(connection, CHALLENGE, until)
    require(token, "client", at, host, client, read(connection, PROOF, until))
    connection.sendall(proof(token, "host", at, host, client))


def read(connection: socket.socket, size: int, until: float | None = None) -> bytes:
    """Exactly so many bytes; raises `ConnectionError` where fewer come, `TimeoutError` where not all of them
    come `until` then, though one after the other does."""
    found = b""
    while len(found) < size:
        if until is not None:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError("the other end takes its time")
            connection.settimeout(left)
        more = connection.recv(size - len(found))
        if not more:
            raise ConnectionError("the other end has closed the connection")
        found += more
    return found
