"""Both ends of a connection prove that they know the job's token before they send anything else.

The token itself never travels. Each end answers the other's challenge with a keyed hash of both challenges
and of the connection: its door, and the addresses and ports of its two ends as this end sees them. So an
answer is useless on any other connection. If addresses are translated on the way, honest ends disagree; a
cluster's network does not do that.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

COORDINATOR, RING = "coordinator", "ring"
"""The doors: the two purposes of connections."""
CHALLENGE = 32
PROOF = 32
GREETING = 10.0
"""Seconds that a client may take to introduce itself."""


class Unwelcome(ConnectionError):
    """The other end does not know the token."""


def challenge() -> bytes:
    return secrets.token_bytes(CHALLENGE)


def place(door: str, client: object, host: object) -> bytes:
    """Return the bytes that identify a connection from `client` to the `door` of `host`."""
    return repr((door, client, host)).encode()


def proof(token: str, who: str, at: bytes, host: bytes, client: bytes) -> bytes:
    """Return the proof of `who`, "host" or "client", for both challenges on the connection `at`."""
    return hmac.digest(token.encode(), who.encode() + host + client + at, "sha256")


def require(token: str, who: str, at: bytes, host: bytes, client: bytes, given: bytes) -> None:
    """Raise `Unwelcome` unless `given` is the proof of `who`."""
    if not hmac.compare_digest(given, proof(token, who, at, host, client)):
        raise Unwelcome(f"the {who} of a connection does not know this job's token, or has passed on a proof")


def introduce(connection: socket.socket, token: str, door: str) -> None:
    """Do the client's part. Raises `Unwelcome`, or another `OSError` if the other end is gone."""
    at = place(door, connection.getsockname(), connection.getpeername())
    host, client = read(connection, CHALLENGE), challenge()
    connection.sendall(client + proof(token, "client", at, host, client))
    require(token, "host", at, host, client, read(connection, PROOF))


def welcome(connection: socket.socket, token: str, door: str, until: float | None = None) -> None:
    """Do the host's part, until a time of `time.monotonic`; raises as `introduce` does."""
    at = place(door, connection.getpeername(), connection.getsockname())
    host = challenge()
    connection.sendall(host)
    client = read(connection, CHALLENGE, until)
    require(token, "client", at, host, client, read(connection, PROOF, until))
    connection.sendall(proof(token, "host", at, host, client))


def read(connection: socket.socket, size: int, until: float | None = None) -> bytes:
    """Return exactly `size` bytes.

    Raises `ConnectionError` if fewer come, and `TimeoutError` if they are not complete at the time `until`,
    even if some keep coming.
    """
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
