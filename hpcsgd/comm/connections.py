"""The ranks of a job without MPI: how they reach each other with short messages, and how they end."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, Protocol

from hpcsgd.comm.backend import PeerLost
from hpcsgd.comm.process_group import distributed
from hpcsgd.comm.relay import ALL, Relay, RelayConnection, RelayMessage
from hpcsgd.comm.shutdown import end_by
from hpcsgd.launcher import AGENT

_END = -1  # tag
_FIRST = 2.0
"""Seconds that ranks wait before they end because of another rank, if torchrun runs them.

torchrun's agent then records that the other rank failed first.
"""
_ECHO = 1.0  # seconds to wait for the relay's copy of the message of `end`, and for stdout


class Group(Protocol):
    """A process group that `Connections` closes."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class RelayAddress:
    """The address of a message relay (`hpcsgd.comm.relay.Relay`)."""

    address: str
    port: int


class Connections:
    """One rank's connections to all ranks of the job, through message relays."""

    def __init__(
        self,
        rank: int,
        nodes: Sequence[int],
        store: Any,
        patience: float,
        own_relay: Relay | None,
        relays: Sequence[RelayAddress],
        token: str,
    ) -> None:
        self.rank, self.size = rank, len(nodes)
        self.nodes, self.patience = nodes, patience
        self._store, self._relay = store, own_relay
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._ended = threading.Event()
        self._ends_all = False
        self.is_attended = False
        """True if other code calls `close` when this rank leaves."""
        self._to_relays: list[RelayConnection] = []
        for i, address in enumerate(relays):
            with contextlib.suppress(OSError):  # the second relay is needed only if the first has gone
                there = socket.create_connection((address.address, address.port), timeout=patience)
                there.settimeout(None)
                lost = self._lose_first if i == 0 else lambda: None
                self._to_relays.append(RelayConnection(there, rank, token, self._hear, lost))

    def client(self) -> Any:
        """Return a new client of the job's store; a shared one blocks all its threads while one waits."""
        return distributed().TCPStore(
            self._store.host, self._store.port, is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=self.patience),
        )  # fmt: skip

    def add(self, group: Group) -> None:
        """Remember `group`, so that it is closed when this rank leaves."""
        self._groups.add(group)

    def end(self, code: int) -> None:
        """End all other ranks with this exit code."""
        self._ends_all = True
        for relay in self._to_relays:
            relay.say(RelayMessage(ALL, self.rank, _END, str(code)))
        if self._to_relays:
            self._ended.wait(_ECHO)

    def send(self, to: int, tag: int, message: bytes) -> None:
        """Send the message `message`, encoded text, to rank `to` through the relay of rank 0."""
        if self._to_relays:
            self._to_relays[0].say(RelayMessage(to, self.rank, tag, message.decode()))

    def receive(self) -> tuple[int, int, bytes] | None:
        """Return the next message with its sender and its tag, or None."""
        message = self._to_relays[0].message() if self._to_relays else None
        return None if message is None else (message.source, message.tag, message.text.encode())

    def is_sending(self) -> bool:
        """Return False, because `send` returns only after the message has been sent."""
        return False

    def expect_end(self) -> None:
        """Take it as no loss from now on if a relay closes its connection."""
        for relay in self._to_relays:
            relay.expect_end()

    def close(self, timeout: float) -> None:
        """Close all connections of this rank once rank 0 closes its own, or after `timeout` seconds.

        If this rank left earlier, ranks that still work would report it as lost. Rank 0 calls this
        method when all other ranks have left.
        """
        if self.rank != 0:
            self._to_relays[0].await_end(timeout)
        for relay in self._to_relays:
            relay.close()
        if self._relay is not None:
            self._relay.close()
        for group in list(self._groups):
            group.close()

    def _hear(self, message: RelayMessage) -> None:
        if self._ends_all:
            self._ended.set()
        else:
            _end(int(message.text))

    def _lose_first(self) -> None:
        end_by(PeerLost("rank 0 has gone"))
        self.end(1)
        _end(1)


def _end(code: int) -> NoReturn:
    """End this process with the exit code `code`, because another rank has ended the job."""
    _within(_ECHO, sys.stdout.flush)
    if AGENT in os.environ:
        time.sleep(_FIRST)
    os._exit(code)


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Run `call` on another thread for at most `seconds`, because a thread may be blocked while it prints."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)
