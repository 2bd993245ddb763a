"""Reports of ranks that are processes: rank 0 receives them on a communicator of their own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence

from hpcsgd.transport.deadlock import Call, Need, Report, Table, Wait
from hpcsgd.transport.mpi_library import MPI
from hpcsgd.transport.rank_watch import LOOK

ANSWERED = 1.0
"""Seconds in which rank 0 says who is missing."""
_PAUSE = 0.01  # seconds
_REPORT, _QUESTION, _ANSWER = 0, 1, 2  # tags


class MpiReports:
    """Reports of one rank of `comm`. On rank 0 a thread calls `end` with the message of a deadlock.

    `comm` is for this alone. Reports are sent by threads that wait anyway; no other rank has a thread for it.
    """

    def __init__(self, comm: MPI.Comm, end: Callable[[str], None]) -> None:
        self._comm, self._end = comm, end
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._sending = threading.Lock()
        self._told: dict[str, int] = {}
        self._table = Table()
        self._closing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="reports of ranks", daemon=True)
        if comm.Get_rank() == 0:
            self._thread.start()

    def add(self, rank: int, report: Report) -> None:
        """Send it, with the counts that have changed."""
        if self._comm.Get_rank() == 0:
            self._table.add(0, report)
            return
        changed = {channel: n for channel, n in report.counts.items() if self._told.get(channel) != n}
        self._told.update(changed)
        calls = {channel: calls for channel, calls in report.calls.items() if channel in changed}
        self._send(0, _REPORT, encoded(report._replace(counts=changed, calls=calls)))

    def check(self) -> None:
        """Do nothing: rank 0 ends all processes."""

    def missing(self, needs: Sequence[Need]) -> list[int]:
        """Return the ranks that are not known to have met these needs: 0, if it does not answer."""
        if self._comm.Get_rank() == 0:
            return self._table.missing(needs)
        self._send(0, _QUESTION, json.dumps([_of_need(need) for need in needs]).encode())
        end = time.monotonic() + ANSWERED
        while not self._comm.Iprobe(0, _ANSWER):
            if time.monotonic() > end:
                return [0]
            time.sleep(_PAUSE)
        return json.loads(self._received(0, _ANSWER))

    def close(self, timeout: float) -> None:
        """Let go of the communicator; on rank 0, once all ranks have left, or after `timeout` seconds."""
        end = time.monotonic() + timeout
        if self._comm.Get_rank() == 0:
            self._closing.set()
            while self._table.left() < self._comm.Get_size() and time.monotonic() < end:
                time.sleep(_PAUSE)
            self._closed = True
            self._thread.join()
        while self._still_sending() and time.monotonic() < end:
            time.sleep(_PAUSE)

    def _listen(self) -> None:
        while not self._closed:
            self._receive()
            if self._table.deadlock is not None:
                self._end(str(self._table.deadlock))
                return
            if self._closing.wait(LOOK):
                time.sleep(_PAUSE)

    def _receive(self) -> None:
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            source, tag = status.Get_source(), status.Get_tag()
            told = self._received(source, tag)
            if tag == _REPORT:
                self._table.add(source, decoded(told))
            else:
                needs = [_need(*given) for given in json.loads(told)]
                self._send(source, _ANSWER, json.dumps(self._table.missing(needs)).encode())

    def _received(self, source: int, tag: int) -> bytes:
        status = MPI.Status()
        self._comm.Probe(source, tag, status)
        told = bytearray(status.Get_count(MPI.BYTE))
        self._comm.Recv([told, MPI.BYTE], source, tag)
        return bytes(told)

    def _send(self, to: int, tag: int, told: bytes) -> None:
        self._still_sending()
        with self._sending:
            self._sent.append((self._comm.Isend([told, MPI.BYTE], to, tag), told))

    def _still_sending(self) -> bool:
        with self._sending:
            self._sent = [(request, told) for request, told in self._sent if not request.Test()]
            return bool(self._sent)


def encoded(report: Report) -> bytes:
    """Return `report` as JSON."""
    waits = [(wait.text, [_of_need(need) for need in wait.needs]) for wait in report.waits]
    return json.dumps((report.blocked, waits, report.counts, report.calls, report.last)).encode()


def decoded(told: bytes) -> Report:
    """Return the report that `encoded` made `told` of."""
    blocked, waits, counts, calls, last = json.loads(told)
    made = tuple(Wait(text, tuple(_need(*given) for given in needs)) for text, needs in waits)
    made_calls = {channel: [Call(*given) for given in some] for channel, some in calls.items()}
    return Report(blocked, made, counts, made_calls, last)


def _of_need(need: Need) -> tuple[str, int, bool, list[int]]:
    """A range goes as its three numbers: it may stand for thousands of ranks."""
    if isinstance(need.ranks, range):
        return need.channel, need.number, True, [need.ranks.start, need.ranks.stop, need.ranks.step]
    return need.channel, need.number, False, list(need.ranks)


def _need(channel: str, number: int, is_range: bool, numbers: Sequence[int]) -> Need:
    return Need(channel, number, range(*numbers) if is_range else tuple(numbers))
