"""A watch of a rank: it reports what the rank's threads wait for once they have waited for a while.

Nothing here takes a lock while a rank makes progress: threads only store their current operation. A thread
that has waited for `PATIENCE` seconds reads the operations of all threads twice. If nothing has changed in
between, all threads of the rank were in these operations at the same time.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, NamedTuple

from hpcsgd.comm.backend import PeerLost
from hpcsgd.comm.deadlock import Call, Need, Report, Reports, Wait
from hpcsgd.comm.last_words import last_line
from hpcsgd.comm.stats import NO_PHASE, activity
from hpcsgd.errors import UserError, in_one_line

PATIENCE = 1.0
"""Seconds for which a thread waits before it checks whether its rank is blocked."""
LOOK = 0.25
"""Seconds between two checks whether a rank is blocked."""
REMEMBERED = 8
"""The number of recent operations on a channel whose descriptions are kept."""
WORLD = "world"
"""The channel of the communicator of all ranks."""


class Operation:
    """The current operation of a communication thread. `needs` returns what it waits for; None if unknown."""

    __slots__ = ("activity", "needs", "what")

    def __init__(self, what: str, needs: Callable[[], tuple[Need, ...]] | None) -> None:
        self.what = what
        self.needs = needs
        self.activity = activity()

    def as_wait(self) -> Wait:
        """Return the `Wait` that describes this operation in a report."""
        return Wait(_in_words(self.what, self.activity), self.needs() if self.needs else ())


class ThreadState:
    """What a `RankWatch` reads of a communication thread."""

    def __init__(self) -> None:
        self.watch: RankWatch | None = None
        """The watch of the rank to which the thread belongs."""
        self.ident: int | None = None
        """The identity of the thread, or None while it does not run."""
        self.entries: deque[object] = deque()
        """One entry for each call that has not ended."""
        self.executing: Operation | None = None
        """The operation that the thread executes now, or None."""
        self.single = False
        """True if the current call consists of the operation `executing` only."""
        self.serves = False
        """True if the thread answers requests and begins no collective."""


class _State(NamedTuple):
    """The state of a rank whose threads all wait. Two equal reads mean that it did not change in between."""

    operations: list[Operation]
    """Operations of which one has to end before the rank begins another one. The first of them is the one
    that the main thread waits for."""
    waiting: list[tuple[int, Future[Any]]]
    """What each thread waits for, with the identity of the thread."""
    comm_threads: list[tuple[int, Operation | None]]
    """For each communication thread, how many calls it has to execute, and its current operation."""


class RankWatch:
    """The record of what the threads of one rank wait for; reports of all ranks show whether they deadlock.

    The threads are the main thread, which creates this object, the communication threads, and other threads
    that submit calls to communication threads.
    """

    def __init__(self, rank: int, reports: Reports) -> None:
        self.rank = rank
        self.counts: dict[str, int] = {}
        """The number of operations that this rank has begun on each channel."""
        self.calls: dict[str, deque[tuple[int, str, tuple[str, str]]]] = {}
        """The last collective operations on each channel: number on the channel, kind, and activity."""
        self.last = ""
        """The last activity that `stats.doing` named."""
        self.leaving = False
        self._reports = reports
        self._owner = threading.get_ident()
        self._others: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._comm_threads: list[ThreadState] = []
        self._waiting: dict[int, tuple[ThreadState, Future[Any]]] = {}
        self._reported = False

    def adopt(self, comm_thread: ThreadState) -> None:
        """Count this communication thread among those of the rank."""
        if comm_thread.watch is None:
            comm_thread.watch = self
            self._comm_threads.append(comm_thread)

    def submits(self) -> None:
        """Record that the calling thread, which is no communication thread itself, uses one.

        Threads that Python did not start, such as autograd's, are left out: a Python thread waits
        while they work.
        """
        if threading.get_ident() != self._owner:
            thread = threading.current_thread()
            if not isinstance(thread, threading._DummyThread):  # pyright: ignore[reportPrivateUsage]
                self._others.add(thread)

    def wait(self, comm_thread: ThreadState, future: Future[Any], timeout: float) -> Any:
        """Return the result of `future`, a call on `comm_thread`.

        Raises:
            TimeoutError: After `timeout` seconds.
            Deadlock: If this rank is in a deadlock. If ranks are processes, they all end instead.
        """
        thread = threading.get_ident()
        self._waiting[thread] = comm_thread, future
        try:
            if thread == self._owner and timeout > PATIENCE:
                return self._watched(future, timeout)
            return future.result(timeout)
        finally:
            del self._waiting[thread]

    def missing(self, comm_thread: ThreadState, timeout: float) -> list[int]:
        """Return the ranks for which `comm_thread` waits and that have not reported that they take part.

        The result is empty if `timeout` seconds were too short for reports.
        """
        operation = comm_thread.executing
        if operation is None or operation.needs is None or timeout < 2 * (PATIENCE + LOOK):
            return []
        return [rank for rank in self._reports.missing(operation.needs()) if rank != self.rank]

    def left(self) -> None:
        """Report that this rank will begin no more operations."""
        self._reports.add(self.rank, Report(True, (), dict(self.counts), self._calls(), self.last))

    def _watched(self, future: Future[Any], timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        try:
            return future.result(PATIENCE)
        except FutureTimeout:
            if future.done():
                raise
        try:
            self._look_until(future, deadline)
            self._reports.check()
        finally:
            if self._reported:
                self._reported = False
                self._reports.add(self.rank, Report(False))
        return future.result(0)

    def _look_until(self, future: Future[Any], deadline: float) -> None:
        before = None
        while not future.done() and (rest := deadline - time.monotonic()) > 0:
            state = self._state()
            if state is None or state != before:
                if self._reported:
                    self._reported = False
                    self._reports.add(self.rank, Report(False))
            elif not self._reported:
                self._reported = True
                self._reports.add(self.rank, self._blocked(state))
            before = state
            self._reports.check()
            with contextlib.suppress(Exception):  # `wait` raises it below
                future.result(min(LOOK, rest))

    def _blocked(self, state: _State) -> Report:
        waits = tuple(operation.as_wait() for operation in state.operations)
        error = sys.exc_info()[1]
        if waits and error is not None and not isinstance(error, (UserError, PeerLost)):  # as in a `finally:`
            text = f"{waits[0].text} while handling {in_one_line(last_line(error))}"
            waits = (waits[0]._replace(text=text), *waits[1:])
        return Report(True, waits, dict(self.counts), self._calls(), self.last if self.leaving else None)

    def _calls(self) -> dict[str, list[Call]]:
        return {
            channel: [
                Call(number, what, _in_words(what, activity)) for number, what, activity in tuple(calls)
            ]
            for channel, calls in list(self.calls.items())
        }

    def _state(self) -> _State | None:
        """Return the state of this rank, or None if it might begin an operation now."""
        waiting = dict(self._waiting)
        if any(future.done() for _, future in waiting.values()):
            return None
        if any(thread.is_alive() and thread.ident not in waiting for thread in list(self._others)):
            return None
        first = waiting[self._owner][0]
        awaited = {comm_thread for comm_thread, _ in waiting.values()}
        comm_threads = sorted(
            (comm_thread for comm_thread in self._comm_threads if not comm_thread.serves),
            key=lambda comm_thread: comm_thread is not first,
        )
        seen = [(len(comm_thread.entries), comm_thread.executing) for comm_thread in comm_threads]
        operations: list[Operation] = []
        for comm_thread, (count, operation) in zip(comm_threads, seen, strict=True):
            if operation is not None:
                if comm_thread in awaited or count > 1 or not comm_thread.single:
                    operations.append(operation)
            elif count > 0 and comm_thread.ident not in waiting:
                return None
        if not operations or any(operation.needs is None for operation in operations):
            return None
        return _State(operations, [(thread, future) for thread, (_, future) in waiting.items()], seen)


class Member:
    """One rank of a communicator, whose operations it counts; `channel` is the communicator's name.

    `ranks` are the world ranks of the members.
    """

    def __init__(self, watch: RankWatch, channel: str, ranks: Sequence[int]) -> None:
        self.watch = watch
        self.answers = False
        """True if threads that answer requests send messages on this communicator; then the order of
        operations is unknown."""
        self._channel = channel
        self._ranks = _compact(ranks)
        self._calls = watch.calls[channel] = deque(maxlen=REMEMBERED)

    def collective(self, what: str, needed: Callable[[], Iterable[int] | None] = lambda: None) -> Operation:
        """Record that this rank begins a collective operation, and return it.

        The operation waits for the members with the ranks that `needed` returns, or for all if that is None.
        """
        count = self._begin(self._channel)

        def needs() -> tuple[Need, ...]:
            some = needed()
            ranks = self._ranks if some is None else _compact([self._ranks[i] for i in some])
            return (Need(self._channel, count, ranks),)

        operation = self._noted(Operation(what, needs))
        self._calls.append((count, what, operation.activity))
        return operation

    def messages(self, what: str, to: Iterable[int], sources: Mapping[int, bool]) -> Operation:
        """Record that this rank begins to send messages to the members `to`, and to receive from `sources`.

        The keys of `sources` are the senders. The values are True for messages that are not empty.
        """
        own = self.watch.rank
        for i in to:
            self._begin(f"{self._channel} {own}>{self._ranks[i]}")
        needs: list[Need] = []
        for i, filled in sources.items():
            channel = f"{self._channel} {self._ranks[i]}>{own}"
            count = self._begin(f"{channel} received")
            if filled:
                needs.append(Need(channel, count, (self._ranks[i],)))
        return self._noted(Operation(what, None if self.answers else lambda: tuple(needs)))

    def split(self, color: int, ranks: Sequence[int]) -> Member:
        """Return this rank as a `Member` of the communicator that the split in progress makes for `color`."""
        return Member(self.watch, f"{self._channel}/{self.watch.counts.get(self._channel, 0)}.{color}", ranks)

    def _begin(self, channel: str) -> int:
        counts = self.watch.counts
        count = counts[channel] = counts.get(channel, 0) + 1
        return count

    def _noted(self, operation: Operation) -> Operation:
        if doing := operation.activity[0]:
            self.watch.last = doing
        return operation


def _in_words(what: str, activity: tuple[str, str]) -> str:
    doing, phase = activity
    call = what if phase == NO_PHASE else f"{what}, {phase}"
    return f"{doing} ({call})" if doing else call


def _compact(ranks: Sequence[int]) -> Sequence[int]:
    """Return `ranks` as a range if possible, so that reports of large worlds stay short."""
    if len(ranks) > 1 and (step := ranks[1] - ranks[0]):
        found = range(ranks[0], ranks[0] + step * len(ranks), step)
        if list(found) == list(ranks):
            return found
    return tuple(ranks)
