"""Both ends of a connection prove that they know the job's token before they send anything else.

The client is the end that connects, the host the end that listens. The token itself is never sent. Each end
answers the other's challenge (random bytes) with a keyed hash of both challenges and of the connection: its
purpose, and the addresses and ports of its two ends as this end sees them. So an answer is useless on any
other connection. The handshake fails if the network translates addresses, which a cluster's network does not.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

COORDINATOR, RING = "coordinator", "ring"
"""The two purposes of connections, called `door` in this module."""
CHALLENGE = 32
PROOF = 32
GREETING = 10.0
"""Seconds that a client may take to introduce itself."""


class Unwelcome(ConnectionError):
    """The error if the other end does not know the token."""


def challenge() -> bytes:
    return secrets.token_bytes(CHALLENGE)


def place(door: str, client: object, host: object) -> bytes:
    """Return bytes that identify a connection from `client` to `host` for the purpose `door`."""
    return repr((door, client, host)).encode()


def proof(token: str, who: str, at: bytes, host: bytes, client: bytes) -> bytes:
    """Return the proof of `who`, "host" or "client", for both challenges on the connection `at`."""
    return hmac.digest(token.encode(), who.encode() + host + client + at, "sha256")


def require(token: str, who: str, at: bytes, host: bytes, client: bytes, given: bytes) -> None:
    """Raise `Unwelcome` unless `given` is the proof of `who`."""
    if not hmac.compare_digest(given, proof(token, who, at, host, client)):
        raise Unwelcome(f"the {who} of a connection does not know this job's token, or has passed on a proof")


def introduce(connection: socket.socket, token: str, door: str) -> None:
    """Do the client's part of the handshake.

    Raises `Unwelcome`, or another `OSError` if the other end is gone.
    """
    at = place(door, connection.getsockname(), connection.getpeername())
    host, client = read(connection, CHALLENGE), challenge()
    connection.sendall(client + proof(token, "client", at, host, client))
    require(token, "host", at, host, client, read(connection, PROOF))


def welcome(connection: socket.socket, token: str, door: str, until: float | None = None) -> None:
    """Do the host's part of the handshake, by the time `until` of `time.monotonic`.

    Raises the same errors as `introduce`.
    """
    at = place(door, connection.getpeername(), connection.getsockname())
    host = challenge()
    connection.sendall(host)
    client = read(connection, CHALLENGE, until)
    require(token, "client", at, host, client, read(connection, PROOF, until))
    connection.sendall(proof(token, "host", at, host, client))


def read(connection: socket.socket, size: int, until: float | None = None) -> bytes:
    """Return exactly `size` bytes.

    Raises `ConnectionError` if the other end closes the connection before, and `TimeoutError` if fewer bytes
    have come at the time `until` of `time.monotonic`.
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
