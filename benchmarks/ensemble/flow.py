"""Measure the rate of one TCP connection between two processes here, which copies each byte twice."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpi4py import MPI

from harness import Contestant, Spread, interleaved
from harness.mpi import Together

TIMES = 5


def flow(size: int) -> float:
    """Return the bytes per second from rank 0 to the last rank with messages of `size` bytes.

    All other ranks are idle meanwhile. All ranks get the result.
    """
    with _message(size) as passed_on:
        seconds = interleaved({"message": Contestant(passed_on)}, rounds=TIMES, ranks=Together())
    return size / Spread.of(seconds["message"].wall).median


@contextmanager
def _message(size: int) -> Iterator[Callable[[], None]]:
    """Yield this rank's part in the transfer of one message, which begins when the receiver asks for it."""
    comm = MPI.COMM_WORLD
    last = comm.Get_size() - 1
    if comm.Get_rank() == 0:
        message = bytes(size)
        with socket.create_connection(comm.recv(source=last)) as connection:
            yield lambda: _send(connection, message)
    elif comm.Get_rank() == last:
        room = memoryview(bytearray(size))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            comm.send(listener.getsockname(), dest=0)
            connection, _ = listener.accept()
            with connection:
                yield lambda: _receive(connection, room)
    else:
        yield lambda: None


def _send(connection: socket.socket, message: bytes) -> None:
    connection.recv(1)
    connection.sendall(message)


def _receive(connection: socket.socket, room: memoryview) -> None:
    connection.sendall(b"!")
    got = 0
    while got < len(room):
        got += connection.recv_into(room[got:])
