"""Both ends of a connection prove that they know the job's token before anything else is said.

The token itself never travels: each end answers the other's challenge with a keyed hash of both challenges.
"""

from __future__ import annotations

import hmac
import secrets
import socket

CHALLENGE = 32
PROOF = 32
GREETING = 10.0
"""Seconds that a guest may take to introduce itself."""


class Unwelcome(ConnectionError):
    """Whoever is at the other end does not know the token."""


def challenge() -> bytes:
    return secrets.token_bytes(CHALLENGE)


def proof(token: str, who: str, host: bytes, guest: bytes) -> bytes:
    """Of `who`, "host" or "guest", for the challenges of both."""
    return hmac.digest(token.encode(), who.encode() + host + guest, "sha256")


def require(token: str, who: str, host: bytes, guest: bytes, given: bytes) -> None:
    """Raises `Unwelcome` unless `given` is their proof."""
    if not hmac.compare_digest(given, proof(token, who, host, guest)):
        raise Unwelcome(f"the {who} of a connection does not know this job's token")


def introduce(connection: socket.socket, token: str) -> None:
    """The guest's part. Raises `Unwelcome`, or another `OSError` where the other end is gone."""
    host, guest = read(connection, CHALLENGE), challenge()
    connection.sendall(guest + proof(token, "guest", host, guest))
    require(token, "host", host, guest, read(connection, PROOF))


def welcome(connection: socket.socket, token: str) -> None:
    """The host's part; raises as `introduce` does."""
    host = challenge()
    connection.sendall(host)
    guest = read(connection, CHALLENGE)
    require(token, "guest", host, guest, read(connection, PROOF))
    connection.sendall(proof(token, "host", host, guest))


def read(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes; raises `ConnectionError` where fewer come."""
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            raise ConnectionError("the other end has closed the connection")
        found += more
    return found
