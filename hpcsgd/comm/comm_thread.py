"""A lane: one communication thread that carries out blocking calls in the order they were given.

The paper's framework does the same ("a communication-dedicated thread that performs blocking MPI
communications"): nonblocking MPI collectives make next to no progress while the owner computes.

On devices a lane has a stream of its own. What it is asked begins there after all that the asker's stream
had to do, and the waiter's stream goes on after it: the host waits for neither.
"""

from __future__ import annotations

import contextvars
import ctypes
import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

import torch

from hpcsgd.comm.backend import PeerLost
from hpcsgd.comm.deadlock import names
from hpcsgd.comm.events import WAIT
from hpcsgd.comm.stats import CommStats
from hpcsgd.comm.streams import StreamEvent, Streams, take_over

if TYPE_CHECKING:
    from hpcsgd.comm.rank_watch import Operation, RankWatch

_comm_threads: weakref.WeakSet[CommThread] = weakref.WeakSet()
_here = threading.local()  # .on_a_comm_thread: the thread is a CommThread's
_numbers = itertools.count()
_SET_TIMER_SLACK = 29  # of prctl


class Work:
    """Something under way on a lane. A call that returns a `Work` has handed the rest to another lane: it is
    done when that is.

    `keep` is kept alive until `wait()`: memory of a device is given away again in the order of the stream
    that asked for it, which knows nothing of the lane's.
    """

    def __init__(
        self,
        future: Future[Any],
        what: str,
        timeout: float,
        stats: CommStats,
        keep: object = None,
        comm_thread: CommThread | None = None,
    ) -> None:
        self._future = future
        self._what = what
        self._timeout = timeout
        self._stats = stats
        self._keep = keep
        self._comm_thread = comm_thread

    def done(self) -> bool:
        """Whether `wait()` would return at once."""
        if not self._future.done():
            return False
        rest = None if self._future.exception() else self._future.result()[0]
        return rest.done() if isinstance(rest, Work) else True

    def wait(self) -> Any:
        """Block until it is done and return its result; on a device, until it has been put on the lane's
        stream, behind which the caller's current one comes from now on.

        Raises `PeerLost` after the transport's timeout, and whatever the operation itself raised. Time
        that a lane waits for another one is not noted: its owner computes meanwhile.
        """
        start, standing = time.perf_counter(), not self._future.done()
        try:
            result, done = self._outcome() if standing else self._future.result()
        except FutureTimeout:
            if self._future.done():  # the operation's own TimeoutError, not ours
                raise
            raise self._given_up() from None
        finally:
            if not getattr(_here, "on_a_comm_thread", False):
                end = time.perf_counter()
                self._stats.add(waited=end - start)
                if standing:
                    self._stats.note(WAIT, self._what, start, end)
        if done is not None:
            done.precede()
            take_over(result)
        self._keep = None
        return result.wait() if isinstance(result, Work) else result

    def _outcome(self) -> Any:
        comm_thread = self._comm_thread
        if comm_thread is None or comm_thread.watch is None:
            return self._future.result(self._timeout)
        return comm_thread.watch.wait(comm_thread, self._future, self._timeout)

    def _given_up(self) -> PeerLost:
        comm_thread = self._comm_thread
        missing = (
            []
            if comm_thread is None or comm_thread.watch is None
            else comm_thread.watch.missing(comm_thread, self._timeout)
        )
        where = f"; not reported to be in it: {names(missing)}" if missing else ""
        return PeerLost(f"{self._what}: no answer within {self._timeout:g} s{where}", missing)


def finished(call: Callable[[], Any], what: str, stats: CommStats) -> Work:
    """`call` carried out here and now, as a `Work`."""
    future: Future[Any] = Future()
    _carry_out(future, lambda: (call(), None))
    return Work(future, what, 0.0, stats)


class CommThread:
    """Runs submitted calls one by one on a daemon thread, started with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.number = next(_numbers)
        self.before_exit: Callable[[], None] | None = None
        """Called before lanes are closed, with all of them still at work, in the order in which they were
        made; collective. Raises `PeerLost` where others do not come."""
        self.watch: RankWatch | None = None
        """Of the rank whose lane it is."""
        self.entries: deque[object] = deque()
        """One for each call that has not ended."""
        self.executing: Operation | None = None
        """The operation under way."""
        self.single = False
        """Whether the call under way is nothing but that operation."""
        self.serves = False
        """Whether it answers others, and begins no collective."""
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], bool] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._streams = Streams()
        _comm_threads.add(self)

    def here(self) -> bool:
        """Whether the caller is the lane's own thread."""
        return threading.current_thread() is self._thread

    @property
    def ident(self) -> int | None:
        """The identity of its thread, if it has one."""
        return None if self._thread is None else self._thread.ident

    def submit(
        self,
        call: Callable[[], Any],
        what: str,
        timeout: float,
        stats: CommStats,
        device: torch.device | None = None,
        keep: object = None,
        single: bool = False,
    ) -> Work:
        """Queue `call`, which keeps the submitter's phase; from the lane's own thread it runs at once.

        With a `device` it runs on the lane's stream there. `keep`: see `Work`. A `single` call is one
        operation, after which it begins no other.
        """
        if self.here():
            return finished(call, what, stats)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        if self.watch is not None and not getattr(_here, "on_a_comm_thread", False):
            self.watch.submits()
        future: Future[Any] = Future()
        context = contextvars.copy_context()
        asked = None if device is None else StreamEvent(device)
        self.entries.append(None)
        self._calls.put((future, lambda: self._carried_out(lambda: context.run(call), asked), single))
        return Work(future, what, timeout, stats, keep, self)

    def close(self, timeout: float) -> bool:
        """End the thread after what is queued; False if that took longer than `timeout` seconds. What is
        submitted later has a new one."""
        if self._thread is None or self.here():
            return True
        self._calls.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def _carried_out(
        self, call: Callable[[], Any], asked: StreamEvent | None
    ) -> tuple[Any, StreamEvent | None]:
        """What `call` returns, and when its work on a device is done."""
        if asked is None:
            return call(), None
        with self._streams.on(asked.device):
            asked.precede()
            return call(), StreamEvent(asked.device)

    def _run(self) -> None:
        _here.on_a_comm_thread = True
        _sleep_exactly()
        while (entry := self._calls.get()) is not None:
            future, call, self.single = entry
            _carry_out(future, call)
            self.entries.popleft()
            del entry, future, call  # or the last operation's tensors live on until the next


def close_comm_threads(timeout: float, comm_threads: Iterable[CommThread] = _comm_threads) -> bool:
    """End these lanes, or every one of this process; False if one was still busy `timeout` seconds later."""
    ordered = sorted(comm_threads, key=lambda comm_thread: comm_thread.number)
    for comm_thread in ordered:
        farewell, comm_thread.before_exit = comm_thread.before_exit, None
        if farewell is not None:
            farewell()
    closed = [comm_thread.close(timeout) for comm_thread in ordered]
    return all(closed)


def know_processor() -> None:
    """Compute the first square root of a process, before other threads can compute theirs.

    With the first sqrt, tanh or exp MKL finds out what the processor is, and that of torch's wheels (2024.2)
    notes a raw number before the right one: a thread that reads it in between computes with another kernel,
    sqrt in float64 to 10⁻¹¹ and tanh to other bits. Issue 188792 of pytorch/pytorch.
    """
    torch.ones(1, dtype=torch.float64, device="cpu").sqrt()


def _sleep_exactly() -> None:
    """From now on sleeps of this thread end when they should. Linux lets them go on for 50 µs more, which is
    long beside a short message."""
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
        future.set_exception(error)
    else:
        future.set_result(result)
