"""Both ends of a connection prove that they know the job's token before they send anything else.

The client is the end that connects, the host the end that listens. The token itself is never sent. Each end
sends a challenge (random bytes). The other end answers with a proof: a hash, with the token as its key, of
both challenges and of the connection. The connection is described by its purpose, and by the addresses and
ports of its two ends as the answering end sees them. So a proof is useless on any other connection. The
handshake fails if the network translates addresses, which a cluster's network does not.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

COORDINATOR, RING = "coordinator", "ring"
"""The two purposes of connections, called `door` in this module."""
CHALLENGE = 32
"""Bytes of a challenge."""
PROOF = 32
"""Bytes of a proof."""
GREETING = 10.0
"""Seconds within which a client must have completed the handshake."""


class Unauthenticated(ConnectionError):
    """The error if the other end of a connection does not know the token."""


def challenge() -> bytes:
    return secrets.token_bytes(CHALLENGE)


def place(door: str, client: object, host: object) -> bytes:
    """Return bytes that identify a connection between the addresses `client` and `host`, for `door`."""
    return repr((door, client, host)).encode()


def proof(token: str, who: str, at: bytes, host: bytes, client: bytes) -> bytes:
    """Return the proof that `who`, "host" or "client", knows the token.

    `at` identifies the connection, as `place` returns it. `host` and `client` are the ends' challenges.
    """
    return hmac.digest(token.encode(), who.encode() + host + client + at, "sha256")


def require(token: str, who: str, at: bytes, host: bytes, client: bytes, given: bytes) -> None:
    """Raise `Unauthenticated` unless `given` equals `proof(token, who, at, host, client)`."""
    if not hmac.compare_digest(given, proof(token, who, at, host, client)):
        raise Unauthenticated(
            f"the {who} of a connection does not know this job's token, or has passed on a proof"
        )


def introduce(connection: socket.socket, token: str, door: str) -> None:
    """Do the client's part of the handshake.

    Raises `Unauthenticated` if the host does not know the token, or another `OSError` if it is gone.
    """
    at = place(door, connection.getsockname(), connection.getpeername())
    host, client = read(connection, CHALLENGE), challenge()
    connection.sendall(client + proof(token, "client", at, host, client))
    require(token, "host", at, host, client, read(connection, PROOF))


def welcome(connection: socket.socket, token: str, door: str, until: float | None = None) -> None:
    """Do the host's part of the handshake, until the time `until` of `time.monotonic` at the latest.

    Raises the same errors as `introduce`, and `TimeoutError`.
    """
    at = place(door, connection.getpeername(), connection.getsockname())
    host = challenge()
    connection.sendall(host)
    client = read(connection, CHALLENGE, until)
    require(token, "client", at, host, client, read(connection, PROOF, until))
    connection.sendall(proof(token, "host", at, host, client))


def read(connection: socket.socket, size: int, until: float | None = None) -> bytes:
    """Receive and return exactly `size` bytes.

    Raises `ConnectionError` if the other end closes the connection before, and `TimeoutError` if fewer bytes
    have come by the time `until` of `time.monotonic`.
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
