"""A simulated network for `Stage`: connections are bytes in memory.

It stands in for `socket`, `select` and `asyncio` in the modules of groups and their coordinator. Data arrives
as soon as it is sent; the seed decides when it is read.
"""

from __future__ import annotations

import asyncio
import socket
import types
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from soak.stage import Actor, Stage, troupe_of_caller

Address = tuple[str, int]


class Wire:
    """One direction of a connection."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.ended = False
        """True if the writer has closed it."""
        self.deaf = False
        """True if the reader has closed it."""


class Socket:
    """One end of a connection. It belongs to the troupe that opened or accepted it."""

    def __init__(self, stage: Stage, incoming: Wire, outgoing: Wire, own: Address, peer: Address) -> None:
        self._stage, self.incoming, self.outgoing = stage, incoming, outgoing
        self._own, self._peer = own, peer
        self._timeout: float | None = None
        self.owner: object = None

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def setblocking(self, blocks: bool) -> None:
        self._timeout = None if blocks else 0.0

    def setsockopt(self, *_: object) -> None:
        """Do nothing: this network does not delay small packets."""

    def getsockname(self) -> Address:
        return self._own

    def getpeername(self) -> Address:
        return self._peer

    def readable(self) -> bool:
        return bool(self.incoming.content) or self.incoming.ended or self.incoming.deaf

    def put(self, data: Any) -> None:
        """Send data without giving another actor a turn."""
        if not self.outgoing.ended and not self.outgoing.deaf:
            self.outgoing.content += data

    def sendall(self, data: Any) -> None:
        self.send(data)

    def send(self, data: Any) -> int:
        self._stage.step_back()
        if self.outgoing.ended or self.outgoing.deaf:
            raise BrokenPipeError("the other end has closed the connection")
        self.outgoing.content += data
        return len(data)

    def recv(self, size: int) -> bytes:
        if not self._stage.wait(self.readable, self._timeout):
            raise BlockingIOError if self._timeout == 0 else TimeoutError("timed out")
        content = self.incoming.content
        found = bytes(content[:size])
        del content[:size]
        return found

    def recv_into(self, room: memoryview) -> int:
        found = self.recv(len(room))
        room[: len(found)] = found
        return len(found)

    def shutdown(self, _: int) -> None:
        self.close()

    def close(self) -> None:
        self.outgoing.ended = self.incoming.deaf = True
        self.incoming.content.clear()


class Listener:
    """A listening socket."""

    def __init__(self, stage: Stage, address: Address) -> None:
        self._stage, self._address = stage, address
        self.owner = troupe_of_caller()
        self.came: deque[Socket] = deque()
        self.open = True

    def getsockname(self) -> Address:
        return self._address

    def accept(self) -> tuple[Socket, Address]:
        self._stage.wait(lambda: bool(self.came) or not self.open)
        if not self.open:
            raise OSError("closed")
        taken = self.came.popleft()
        taken.owner = troupe_of_caller()
        return taken, self._address

    def shutdown(self, _: int) -> None:
        self.close()

    def close(self) -> None:
        self.open = False
        for each in self.came:
            each.close()


class Network:
    """All sockets and listeners of a stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.sockets: list[Socket] = []
        self._listeners: dict[Address, Listener] = {}
        self._ports = iter(range(1000, 100_000))

    def listen(self, place: Address) -> Listener:
        address = place[0], place[1] or next(self._ports)
        self._listeners[address] = made = Listener(self.stage, address)
        return made

    def connect(self, address: Address, timeout: float | None = None) -> Socket:
        self.stage.step_back()
        there = self._listeners.get(address)
        if there is None or not there.open:
            raise ConnectionRefusedError(f"nobody is at {address}")
        one, other = Wire(), Wire()
        own = "client", next(self._ports)
        mine = Socket(self.stage, one, other, own, address)
        theirs = Socket(self.stage, other, one, address, own)
        mine.owner, theirs.owner = troupe_of_caller(), there.owner
        mine.settimeout(timeout)
        there.came.append(theirs)
        self.sockets += mine, theirs
        return mine

    def die(self, troupe: object) -> None:
        """Kill a troupe and close its connections, as the system does for a killed process."""
        self.stage.kill(troupe)
        for each in self.sockets:
            if each.owner == troupe:
                each.close()
        for listener in self._listeners.values():
            if listener.owner == troupe:
                listener.close()


class Poll:
    """A stand-in for `select.poll`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._ready: list[Callable[[], bool]] = []

    def register(self, each: Socket, mask: int) -> None:
        self._ready.append(each.readable if mask == _IN else lambda: True)

    def poll(self, milliseconds: float) -> list[object]:
        ready = lambda: any(each() for each in self._ready)  # noqa: E731
        return [self] if self._stage.wait(ready, milliseconds / 1000) else []


_IN, _OUT = 1, 4


class Reader:
    """A stand-in for `asyncio.StreamReader`. Its reads block the actor that runs the coroutine."""

    def __init__(self, end: Socket) -> None:
        self._end, self._rest = end, b""

    async def readexactly(self, size: int) -> bytes:
        while len(self._rest) < size:
            self._more(size)
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    async def readline(self) -> bytes:
        try:
            while b"\n" not in self._rest:
                self._more(0)
        except asyncio.IncompleteReadError:
            self._rest += b"\n"
            return self._rest[:-1]
        line, _, self._rest = self._rest.partition(b"\n")
        return line + b"\n"

    def _more(self, size: int) -> None:
        if not (more := self._end.recv(65536)):
            raise asyncio.IncompleteReadError(self._rest, size)
        self._rest += more


class Writer:
    """A stand-in for `asyncio.StreamWriter`."""

    def __init__(self, end: Socket) -> None:
        self.write, self.close = end.put, self._close
        ends = {"sockname": end.getsockname(), "peername": end.getpeername()}
        self.get_extra_info = ends.__getitem__
        self._end = end
        self.transport = types.SimpleNamespace(abort=end.close)

    def _close(self) -> None:
        """Close the connection, but still deliver what was written."""
        self._end.outgoing.ended = self._end.incoming.deaf = True


class Server:
    """A stand-in for `asyncio.Server` that handles each connection on an actor of its own."""

    def __init__(self, stage: Stage, serve: Callable[..., Coroutine[Any, Any, None]], at: Listener) -> None:
        self._stage, self._serve, self.sockets = stage, serve, (at,)
        Actor(stage, target=self._accept, name="server").start()

    def _accept(self) -> None:
        try:
            while True:
                end, _ = self.sockets[0].accept()
                Actor(self._stage, target=self._talk, args=(end,), name="conversation").start()
        except OSError:
            return

    def _talk(self, end: Socket) -> None:
        """Run the coroutine. It is created here, because Python warns of coroutines that never run."""
        driven(self._serve(Reader(end), Writer(end)))

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sockets[0].close()


def driven(talk: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never yields to an event loop; there is no loop."""
    try:
        talk.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for a loop")


def asyncio_of(network: Network) -> types.SimpleNamespace:
    stage = network.stage

    async def start_server(serve: Any, host: str, port: int) -> Server:
        return Server(stage, serve, network.listen((host, port)))

    async def sleep(seconds: float) -> None:
        stage.sleep(seconds)

    async def wait_for(talk: Coroutine[Any, Any, Any], _: float) -> Any:
        return await talk

    return types.SimpleNamespace(
        start_server=start_server, sleep=sleep, wait_for=wait_for, CancelledError=asyncio.CancelledError
    )


def socket_of(network: Network) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        create_connection=network.connect,
        create_server=network.listen,
        SHUT_RDWR=socket.SHUT_RDWR,
        IPPROTO_TCP=socket.IPPROTO_TCP,
        TCP_NODELAY=socket.TCP_NODELAY,
    )


def select_of(stage: Stage) -> types.SimpleNamespace:
    return types.SimpleNamespace(poll=lambda: Poll(stage), POLLIN=_IN, POLLOUT=_OUT)
