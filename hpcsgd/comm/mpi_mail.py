"""The protocol `Mail` of `mailed_reports` by MPI, on its own communicator."""

from __future__ import annotations

import threading

from hpcsgd.comm.mpi_library import MPI


class MpiMail:
    """The messages of one rank on `comm`, which nothing else may use."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._comm = comm
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._sending = threading.Lock()

    def send(self, to: int, tag: int, message: bytes) -> None:
        """Send `message` to rank `to` and return at once."""
        self.is_sending()
        with self._sending:
            self._sent.append((self._comm.Isend([message, MPI.BYTE], to, tag), message))

    def receive(self) -> tuple[int, int, bytes] | None:
        """Return the next message with its sender and its tag, or None."""
        status = MPI.Status()
        if not self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            return None
        source, tag = status.Get_source(), status.Get_tag()
        message = bytearray(status.Get_count(MPI.BYTE))
        self._comm.Recv([message, MPI.BYTE], source, tag)
        return source, tag, bytes(message)

    def is_sending(self) -> bool:
        """Return True if a message has not left yet."""
        with self._sending:
            self._sent = [(request, message) for request, message in self._sent if not request.Test()]
            return bool(self._sent)

    def expect_end(self) -> None:
        """Do nothing, because MPI closes no connection before all ranks have left."""

    def close(self, timeout: float) -> None:
        """Do nothing, because MPI frees the communicator with the process."""
