"""Short messages between the ranks of a job without MPI, at any time.

A `Relay` on one rank forwards messages. Every rank has a `RelayConnection` to it. A `RelayMessage` is one
line of JSON. The relay closes connections that do not begin with the job's token.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

ALL = -1
_SEND = 5.0  # seconds after which the relay gives up sending a message
_LONGEST = 1 << 24  # bytes of a line


class RelayMessage(NamedTuple):
    """A message from one rank to another one, or to all."""

    to: int
    source: int
    tag: int
    text: str


class Relay:
    """The server that forwards messages between the ranks.

    A message to all ranks goes to its sender last. The sender then knows that the others have been sent it.
    """

    def __init__(self, listening: socket.socket, token: str) -> None:
        self._listening, self._token = listening, token
        self._lines: dict[int, socket.socket] = {}
        self._read: dict[socket.socket, bytearray] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready, self._listening:
            ready.register(self._listening, selectors.EVENT_READ)
            while not self._closed.is_set():
                for key, _ in ready.select(0.1):
                    if key.fileobj is self._listening:
                        with contextlib.suppress(OSError):
                            there, _ = self._listening.accept()
                            there.settimeout(_SEND)
                            self._read[there] = bytearray()
                            ready.register(there, selectors.EVENT_READ)
                    elif isinstance(key.fileobj, socket.socket) and not self._hears(key.fileobj):
                        ready.unregister(key.fileobj)
                        self._forget(key.fileobj)
            for there in list(self._read):
                self._forget(there)

    def _hears(self, there: socket.socket) -> bool:
        """Read from the socket `there`, forward complete lines, and return True if it stays open."""
        try:
            come = there.recv(1 << 16)
        except OSError:
            return False
        read = self._read[there]
        read += come
        *lines, rest = read.split(b"\n")
        self._read[there] = bytearray(rest)
        return bool(come) and len(rest) < _LONGEST and all(self._takes(there, bytes(line)) for line in lines)

    def _takes(self, there: socket.socket, line: bytes) -> bool:
        try:
            message = RelayMessage(*json.loads(line))
        except (ValueError, TypeError):
            return False
        if there not in self._lines.values():
            if message.text != self._token:
                return False
            self._lines[message.source] = there
            return True
        others = [rank for rank in self._lines if rank != message.source]
        for rank in [*others, message.source] if message.to == ALL else [message.to]:
            if rank in self._lines:
                _send(self._lines[rank], line + b"\n")
        return True

    def _forget(self, there: socket.socket) -> None:
        del self._read[there]
        for rank in [rank for rank, line in self._lines.items() if line is there]:
            del self._lines[rank]
        there.close()


class RelayConnection:
    """The connection of one rank to a message relay.

    A thread receives messages. It calls `heard` with those sent to all ranks, and keeps the others for
    `message`. If the relay closes the connection, the thread calls `lost`.
    """

    def __init__(
        self,
        there: socket.socket,
        rank: int,
        token: str,
        heard: Callable[[RelayMessage], None],
        lost: Callable[[], None],
    ) -> None:
        self._there, self.rank = there, rank
        self._heard, self._lost = heard, lost
        self._come: deque[RelayMessage] = deque()
        self._saying = threading.Lock()
        self._closed = False
        self.say(RelayMessage(rank, rank, 0, token))
        self._thread = threading.Thread(target=self._listen, name="relay connection", daemon=True)
        self._thread.start()

    def say(self, message: RelayMessage) -> None:
        """Send `message` to the relay, which forwards it; do nothing if the relay is gone."""
        with self._saying:
            _send(self._there, json.dumps(message).encode() + b"\n")

    def message(self) -> RelayMessage | None:
        """Return the next message that was sent to this rank alone, or None if there is none."""
        return self._come.popleft() if self._come else None

    def expect_end(self) -> None:
        """From now on, do not call `lost` if the relay closes the connection."""
        self._closed = True

    def await_end(self, timeout: float) -> None:
        """Wait until the relay closes the connection, at most `timeout` seconds, without calling `lost`."""
        self.expect_end()
        self._thread.join(timeout)

    def close(self) -> None:
        """Close the connection to the relay."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._there.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self._there.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._there.makefile("rb") as words:
            for line in words:
                message = RelayMessage(*json.loads(line))
                if message.to == ALL:
                    self._heard(message)
                else:
                    self._come.append(message)
        if not self._closed:
            self._lost()


def _send(there: socket.socket, line: bytes) -> None:
    with contextlib.suppress(OSError):
        there.sendall(line)
