"""What one TCP connection between two processes on this machine carries: each byte is copied twice."""

from __future__ import annotations

import socket
import time
from statistics import median

from mpi4py import MPI

TIMES = 5


def flow(size: int) -> float:
    """Bytes per second from rank 0 to the last rank, messages of `size`, all others idle; on all ranks."""
    comm = MPI.COMM_WORLD
    if comm.Get_rank() == 0:
        rate = _send(comm, size)
    elif comm.Get_rank() == comm.Get_size() - 1:
        rate = _receive(comm, size)
    else:
        rate = 0.0
    return comm.bcast(rate, root=comm.Get_size() - 1)


def _send(comm: MPI.Comm, size: int) -> float:
    message = bytes(size)
    with socket.create_connection(comm.recv(source=comm.Get_size() - 1)) as connection:
        for _ in range(TIMES):
            connection.recv(1)
            connection.sendall(message)
    return 0.0


def _receive(comm: MPI.Comm, size: int) -> float:
    room, seconds = memoryview(bytearray(size)), []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        comm.send(listener.getsockname(), dest=0)
        connection, _ = listener.accept()
        with connection:
            for _ in range(TIMES):
                start, got = time.perf_counter(), 0
                connection.sendall(b"!")
                while got < size:
                    got += connection.recv_into(room[got:])
                seconds.append(time.perf_counter() - start)
    return size / median(seconds)
