"""Sums over the replica groups of a generation, by a ring of TCP connections that can be interrupted.

A shard of the model has an owner, a rank, in every replica group. The owners of a shard form a ring: each
sends to its right neighbour and receives from its left one. A rank that owns several shards is in several
rings. The register decides which groups take part, not this module.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hpcsgd.elastic.handshake import GREETING, RING, introduce, read, welcome
from hpcsgd.elastic.pending_connections import PendingConnections

_LINE = 256
"""Bytes of the message by which a neighbour says for which ring it connects."""
_GLANCE = 0.1
"""Seconds between two checks of whether to continue waiting."""
_AT_THE_DOOR = 64
"""The largest number of handshakes at once, each of which has a thread."""
_BLOCK = 1 << 20
"""Bytes to send or add at once: large, but so that data just received is still in the cache."""

Overdue = Callable[[float], bool]
"""A function that gets the time since which a rank has waited, and returns True if it should give up."""


class Broken(ConnectionError):
    """The error if a ring cannot continue because of the neighbour on one `side`: -1 left, 1 right."""

    def __init__(self, side: int, why: str) -> None:
        super().__init__(why)
        self.side = side


class Listener:
    """The socket at which this rank's left neighbours connect, in all rings and generations."""

    def __init__(self, host: str, token: str) -> None:
        """Listen at `host`, the address of this node in the job's own network."""
        self._token = token
        self._listener = socket.create_server((host, 0))
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self._strangers = PendingConnections(_AT_THE_DOOR)
        self._closed = False
        self._came: dict[tuple[int, int], socket.socket] = {}
        self._news = threading.Condition()
        threading.Thread(target=self._open, name="door", daemon=True).start()

    def wait_for(
        self, generation: int, shard: int, overdue: Overdue, given_up: Callable[[], bool]
    ) -> socket.socket:
        """Wait for the left neighbour's connection in the ring of shard `shard`, and return it.

        Raises `ConnectionError` if `given_up` or `overdue` returns True before the neighbour connects.
        """
        since = time.monotonic()
        with self._news:
            while (generation, shard) not in self._came:
                self._news.wait(_GLANCE)
                if given_up():
                    raise ConnectionError("the generation has ended")
                if overdue(since):
                    raise Broken(-1, "the left neighbour did not connect")
            self._forget(lambda known: known < generation)
            return self._came.pop((generation, shard))

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._news:
            self._forget(lambda _: True)

    def _forget(self, which: Callable[[int], bool]) -> None:
        for key in [key for key in self._came if which(key[0])]:
            self._came.pop(key).close()

    def _open(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_GLANCE)  # there are too many open files, or the neighbour has left
                continue
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        until = time.monotonic() + GREETING
        try:
            with self._strangers.one_more(lambda: _shut(connection)):
                welcome(connection, self._token, RING, until)
                greeting = json.loads(read(connection, _LINE, until))
        except (OSError, ValueError):
            connection.close()
            return
        with self._news:
            if self._closed:
                connection.close()
                return
            self._came[greeting["generation"], greeting["shard"]] = connection
            self._news.notify_all()


class TcpRing:
    """The connections to both neighbours in the ring of one shard; this rank is number `place` of `size`."""

    def __init__(
        self,
        place: int,
        size: int,
        left: socket.socket | None = None,
        right: socket.socket | None = None,
        overdue: Overdue = lambda _: False,
    ) -> None:
        self.place, self.size = place, size
        self._left, self._right, self._overdue = left, right, overdue
        for connection in (left, right):
            if connection is not None:
                connection.setblocking(False)

    def mean(self, x: Tensor | None, mean: Tensor, counting: int) -> None:
        """Set `mean` to the sum of `x` over the ring's ranks, divided by `counting`. Collective.

        All ranks get the same bits. If `x` is None, the rank adds nothing. `x` and `mean` are contiguous, on
        the CPU, and do not overlap. A reduce-scatter and an allgather send 2·(size−1)/size of the bytes of x
        around the ring. Raises `OSError` if a connection breaks or is interrupted; `mean` is then invalid.
        """
        cuts = [mean.numel() * i // self.size for i in range(self.size + 1)]
        means = [mean[a:b] for a, b in pairwise(cuts)]
        mine = [None if x is None else x[a:b] for a, b in pairwise(cuts)]
        out = mine[self.place]
        if out is None:
            out = torch.zeros_like(means[self.place])
        for step in range(self.size - 1):
            here = (self.place - step - 1) % self.size
            self._pass_on(out, means[here], mine[here])
            out = means[here]
        if self.size == 1:
            means[0].copy_(out)
        means[(self.place + 1) % self.size].div_(counting)
        for step in range(self.size - 1):
            out = means[(self.place - step + 1) % self.size]
            self._pass_on(out, means[(self.place - step) % self.size])

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of all the ring's ranks, by place, which have equally many numbers. Collective.

        Raises `OSError` if a connection breaks or is interrupted.
        """
        rows = torch.zeros(self.size, len(row), dtype=torch.float64, device="cpu")
        rows[self.place] = torch.tensor(row, dtype=torch.float64, device="cpu")
        found = torch.empty_like(rows)
        self.mean(rows.view(-1), found.view(-1), 1)
        return [[x.item() for x in each] for each in found]

    def cut(self) -> None:
        """Interrupt the current sum, on this rank and its neighbours. Any thread may call this."""
        for connection in (self._left, self._right):
            if connection is not None:
                _shut(connection)

    def close(self) -> None:
        self.cut()
        for connection in (self._left, self._right):
            if connection is not None:
                connection.close()

    def _pass_on(self, out: Tensor, into: Tensor, addend: Tensor | None = None) -> None:
        """Send `out` to the right and receive `into` from the left at the same time.

        The sends do not block, because blocking sends of large messages would deadlock. `addend` is added to
        the received data block by block, while the block is in the cache and the next one is being sent.
        """
        assert self._left is not None
        assert self._right is not None
        left, right, outgoing, incoming = self._left, self._right, _bytes(out), _bytes(into)
        size, sent, came, added = into.element_size(), 0, 0, 0
        since = time.monotonic()
        while sent < len(outgoing) or came < len(incoming):
            before = sent, came
            sent += _send(right, outgoing[sent : sent + _BLOCK])
            came += _receive(left, incoming[came : came + _BLOCK])
            if addend is not None and (came - added * size >= _BLOCK or came == len(incoming)):
                into[added : came // size].add_(addend[added : came // size])
                added = came // size
            if (sent, came) != before:
                since = time.monotonic()
                continue
            waiting = left if came < len(incoming) else None, right if sent < len(outgoing) else None
            if not _look(*waiting) and self._overdue(since):
                raise Broken(-1 if came < len(incoming) else 1, "a neighbour neither sends nor receives")


def connect(
    door: Listener,
    generation: int,
    shard: int,
    place: int,
    addresses: list[str],
    *,
    token: str,
    heartbeat_timeout: float,
    overdue: Overdue,
    given_up: Callable[[], bool],
) -> TcpRing:
    """Return the ring of the ranks at `addresses`, each of which must call this function.

    This rank is number `place`. Listeners are always open, so the right neighbour must answer within
    `heartbeat_timeout` seconds. The left neighbour connects when it has trained; `overdue` limits this wait.
    Raises `OSError` if a neighbour is missing.
    """
    size = len(addresses)
    if size == 1:
        return TcpRing(0, 1)
    host, port = addresses[(place + 1) % size].rsplit(":", 1)
    try:
        right = socket.create_connection((host, int(port)), timeout=heartbeat_timeout)
    except OSError as error:
        raise Broken(1, f"the right neighbour does not answer: {error}") from error
    try:
        right.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _done(1, lambda: introduce(right, token, RING))
        right.sendall(json.dumps({"generation": generation, "shard": shard}).encode().ljust(_LINE))
        left = door.wait_for(generation, shard, overdue, given_up)
    except OSError:
        right.close()
        raise
    return TcpRing(place, size, left, right, overdue)


def _shut(connection: socket.socket) -> None:
    """Shut the connection down, so that a thread that waits for it wakes up."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _done(side: int, call: Callable[[], Any]) -> Any:
    """Return `call()`. If it raises `OSError`, raise `Broken`, which names the neighbour on `side`."""
    try:
        return call()
    except OSError as error:
        raise Broken(side, str(error)) from error


def _bytes(x: Tensor) -> memoryview:
    return x.view(torch.uint8).numpy().data


def _send(right: socket.socket, message: memoryview) -> int:
    """Send as much of `message` as is possible without waiting; return the number of bytes sent."""
    try:
        return right.send(message) if message else 0
    except BlockingIOError:
        return 0
    except OSError as error:
        raise Broken(1, str(error)) from error


def _receive(left: socket.socket, room: memoryview) -> int:
    """Receive into `room` what has arrived, without waiting; return the number of bytes received."""
    try:
        count = left.recv_into(room) if room else 0
    except BlockingIOError:
        return 0
    except OSError as error:
        raise Broken(-1, str(error)) from error
    if room and count == 0:
        raise Broken(-1, "the left neighbour has closed the connection")
    return count


def _look(left: socket.socket | None, right: socket.socket | None) -> bool:
    """Wait until `left` can be read or `right` written, at most `_GLANCE` seconds; return True if so."""
    poll = select.poll()
    if left is not None:
        poll.register(left, select.POLLIN)
    if right is not None:
        poll.register(right, select.POLLOUT)
    return bool(poll.poll(1000 * _GLANCE))
