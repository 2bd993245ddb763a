"""Both ends of a connection prove that they know the job's token before anything else is said.

The token itself never travels: each end answers the other's challenge with a keyed hash of both challenges.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

CHALLENGE = 32
PROOF = 32
GREETING = 10.0
"""Seconds that a client may take to introduce itself."""


class Unwelcome(ConnectionError):
    """Whoever is at the other end does not know the token."""


def challenge() -> bytes:
    return secrets.token_bytes(CHALLENGE)


def proof(token: str, who: str, host: bytes, client: bytes) -> bytes:
    """Of `who`, "host" or "client", for the challenges of both."""
    return hmac.digest(token.encode(), who.encode() + host + client, "sha256")


def require(token: str, who: str, host: bytes, client: bytes, given: bytes) -> None:
    """Raises `Unwelcome` unless `given` is their proof."""
    if not hmac.compare_digest(given, proof(token, who, host, client)):
        raise Unwelcome(f"the {who} of a connection does not know this job's token")


def introduce(connection: socket.socket, token: str) -> None:
    """The client's part. Raises `Unwelcome`, or another `OSError` where the other end is gone."""
    host, client = read(connection, CHALLENGE), challenge()
    connection.sendall(client + proof(token, "client", host, client))
    require(token, "host", host, client, read(connection, PROOF))


def welcome(connection: socket.socket, token: str, until: float | None = None) -> None:
    """The host's part, up to a moment on the clock `time.monotonic`; raises as `introduce` does."""
    host = challenge()
    connection.sendall(host)
    client = read(connection, CHALLENGE, until)
    require(token, "client", host, client, read(connection, PROOF, until))
    connection.sendall(proof(token, "host", host, client))


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
