"""Reports about what ranks wait for, which ranks in processes of their own send to rank 0 as messages."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hpcsgd.comm.deadlock import Call, Need, Report, Table, Wait
from hpcsgd.comm.rank_watch import LOOK

ANSWERED = 1.0
"""Seconds for which a rank waits until rank 0 answers the question which ranks are missing."""
_PAUSE = 0.01  # seconds
_REPORT, _QUESTION, _ANSWER = 0, 1, 2  # tags


class Mail(Protocol):
    """Messages between the processes of two ranks, separate from all other communication."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def send(self, to: int, tag: int, message: bytes) -> None:
        """Send `message` to rank `to` and return at once."""
        ...

    def receive(self) -> tuple[int, int, bytes] | None:
        """Return the sender, the tag and the text of the next message; None if there is none yet."""
        ...

    def is_sending(self) -> bool:
        """Return True if a message has not left yet."""
        ...

    def expect_end(self) -> None:
        """Take it as no loss from now on if rank 0 closes the connection."""
        ...

    def close(self, timeout: float) -> None:
        """Release the connection, within `timeout` seconds."""
        ...


class MailedReports:
    """The reports of one rank about what it waits for, which it sends to rank 0.

    On rank 0 a thread receives the reports of all ranks. If they show a deadlock, it calls `end` with a
    description. On other ranks the threads that wait send the reports, so no extra thread is needed. Nothing
    else may use `mail`.
    """

    def __init__(self, mail: Mail, end: Callable[[str], None]) -> None:
        self._mail, self._end = mail, end
        self._reported: dict[str, int] = {}
        self._table = Table()
        self._closing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="reports of ranks", daemon=True)
        if mail.rank == 0:
            self._thread.start()

    def add(self, rank: int, report: Report) -> None:
        """Send `report` to rank 0, with only the counts that have changed; on rank 0, record it."""
        if self._mail.rank == 0:
            self._table.add(0, report)
            return
        changed = {channel: n for channel, n in report.counts.items() if self._reported.get(channel) != n}
        self._reported.update(changed)
        calls = {channel: calls for channel, calls in report.calls.items() if channel in changed}
        if report.has_left:  # once rank 0 has this report of all ranks, it leaves, too
            self._mail.expect_end()
        self._mail.send(0, _REPORT, encoded(report._replace(counts=changed, calls=calls)))

    def check(self) -> None:
        """Do nothing: if there is a deadlock, rank 0 ends all processes, so no rank has to raise an error.

        If ranks are threads of one process, `Table` has their reports, and its `check` raises `Deadlock`.
        """

    def missing(self, needs: Sequence[Need]) -> list[int]:
        """Return the ranks of which rank 0 does not know that they have begun the operations in `needs`.

        Rank 0 is the only one returned if it does not answer within `ANSWERED` seconds.
        """
        if self._mail.rank == 0:
            return self._table.missing(needs)
        self._mail.send(0, _QUESTION, json.dumps([_of_need(need) for need in needs]).encode())
        end = time.monotonic() + ANSWERED
        while (answer := self._mail.receive()) is None:
            if time.monotonic() > end:
                return [0]
            time.sleep(_PAUSE)
        return json.loads(answer[2])

    def close(self, timeout: float) -> None:
        """Release `mail`; on rank 0, after all ranks have left or `timeout` seconds have passed."""
        end = time.monotonic() + timeout
        if self._mail.rank == 0:
            self._closing.set()
            while self._table.left() < self._mail.size and time.monotonic() < end:
                time.sleep(_PAUSE)
            self._closed = True
            self._thread.join()
        while self._mail.is_sending() and time.monotonic() < end:
            time.sleep(_PAUSE)
        self._mail.close(max(end - time.monotonic(), 0.0))

    def _listen(self) -> None:
        while not self._closed:
            self._receive()
            if self._table.deadlock is not None:
                self._end(str(self._table.deadlock))
                return
            if self._closing.wait(LOOK):
                time.sleep(_PAUSE)

    def _receive(self) -> None:
        while (found := self._mail.receive()) is not None:
            source, tag, message = found
            if tag == _REPORT:
                self._table.add(source, decoded(message))
            else:
                needs = [_need(*given) for given in json.loads(message)]
                self._mail.send(source, _ANSWER, json.dumps(self._table.missing(needs)).encode())


def encoded(report: Report) -> bytes:
    """Return `report` as JSON."""
    waits = [(wait.text, [_of_need(need) for need in wait.needs]) for wait in report.waits]
    return json.dumps((report.blocked, waits, report.counts, report.calls, report.last)).encode()


def decoded(message: bytes) -> Report:
    """Return the report that `encoded` turned into `message`."""
    blocked, waits, counts, calls, last = json.loads(message)
    made = tuple(Wait(text, tuple(_need(*given) for given in needs)) for text, needs in waits)
    made_calls = {channel: [Call(*given) for given in some] for channel, some in calls.items()}
    return Report(blocked, made, counts, made_calls, last)


def _of_need(need: Need) -> tuple[str, int, bool, list[int]]:
    """Return `need` as JSON values; a range becomes three numbers, as it may cover thousands of ranks."""
    if isinstance(need.ranks, range):
        return need.channel, need.number, True, [need.ranks.start, need.ranks.stop, need.ranks.step]
    return need.channel, need.number, False, list(need.ranks)


def _need(channel: str, number: int, is_range: bool, numbers: Sequence[int]) -> Need:
    return Need(channel, number, range(*numbers) if is_range else tuple(numbers))
