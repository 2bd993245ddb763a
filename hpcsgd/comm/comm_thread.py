"""A communication thread: it executes blocking calls in the order in which they were submitted.

The framework of the hierarchical local SGD paper does the same ("a communication-dedicated thread that
performs blocking MPI communications"), because nonblocking MPI collectives make almost no progress while the
rank computes.

On a device the thread has its own stream. A call begins there after the work that the submitter's stream
already has. After `wait()`, the waiting thread's stream continues when the call is done. The host need not
wait for the device in either case.
"""

from __future__ import annotations

import contextvars
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch

from hpcsgd.comm.backend import PeerLost
from hpcsgd.comm.deadlock import names
from hpcsgd.comm.events import WAIT
from hpcsgd.comm.rank_watch import ThreadState
from hpcsgd.comm.stats import CommStats
from hpcsgd.comm.streams import StreamEvent, Streams, take_over
from hpcsgd.comm.timer_slack import sleep_exactly

_comm_threads: weakref.WeakSet[CommThread] = weakref.WeakSet()
_here = threading.local()  # .on_a_comm_thread: True on a communication thread
_numbers = itertools.count()


class Work:
    """The pending result of a call on a communication thread.

    A call may return the `Work` of another communication thread. It is then done when that `Work` is done.

    `keep`, such as the operation's tensors, stays alive until `wait()`. Otherwise the device's allocator
    could reuse their memory too early, because it does not know the communication thread's stream.
    """

    def __init__(
        self,
        future: Future[Any],
        what: str,
        timeout: float,
        stats: CommStats,
        keep: object = None,
        thread: ThreadState | None = None,
    ) -> None:
        self._future = future
        self._what = what
        self._timeout = timeout
        self._stats = stats
        self._keep = keep
        self._thread = thread

    def done(self) -> bool:
        """Return True if `wait()` would return at once."""
        if not self._future.done():
            return False
        rest = None if self._future.exception() else self._future.result()[0]
        return rest.done() if isinstance(rest, Work) else True

    def wait(self) -> Any:
        """Block until the call is done and return its result.

        On a device, block until the work is queued on the communication thread's stream; the caller's
        current stream waits for it there.

        Raises `PeerLost` after the communicator's timeout, or the operation's own exception. The
        seconds of the wait are added to `stats`, unless a communication thread waits for another
        one: the training thread computes meanwhile.
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
        thread = self._thread
        if thread is None or thread.watch is None:
            return self._future.result(self._timeout)
        return thread.watch.wait(thread, self._future, self._timeout)

    def _given_up(self) -> PeerLost:
        thread, missing = self._thread, list[int]()
        if thread is not None and thread.watch is not None:
            missing = thread.watch.missing(thread, self._timeout)
        where = f"; not reported to be in it: {names(missing)}" if missing else ""
        return PeerLost(f"{self._what}: no answer within {self._timeout:g} s{where}", missing)


def finished(call: Callable[[], Any], what: str, stats: CommStats) -> Work:
    """Execute `call` here and now, and return the result as a `Work`."""
    future: Future[Any] = Future()
    _carry_out(future, lambda: (call(), None))
    return Work(future, what, 0.0, stats)


class CommThread:
    """A daemon thread that runs submitted calls one by one. The first call starts it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.number = next(_numbers)
        self.before_exit: Callable[[], None] | None = None
        """Called before communication threads are closed, while all of them still work, in the order
        in which they were made. Collective. Raises `PeerLost` if other ranks do not take part."""
        self.state = ThreadState()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], bool] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._streams = Streams()
        _comm_threads.add(self)

    def here(self) -> bool:
        """Return True if the caller runs on this communication thread."""
        return threading.current_thread() is self._thread

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
        """Queue `call` for this thread, and return its `Work`; if the caller is this thread, run it at once.

        The call's messages count in the `phase` in which the caller submits it. With a `device`, the call
        runs on this thread's stream of that device. For `keep` see `Work`. A `single` call is one operation,
        and begins no other.
        """
        if self.here():
            return finished(call, what, stats)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            self.state.ident = self._thread.ident
        if self.state.watch is not None and not getattr(_here, "on_a_comm_thread", False):
            self.state.watch.submits()
        future: Future[Any] = Future()
        context = contextvars.copy_context()
        asked = None if device is None else StreamEvent(device)
        self.state.entries.append(None)
        self._calls.put((future, lambda: self._carried_out(lambda: context.run(call), asked), single))
        return Work(future, what, timeout, stats, keep, self.state)

    def close(self, timeout: float) -> bool:
        """End the thread after the queued calls; return False if that took longer than `timeout` seconds.

        A later call starts a new thread.
        """
        if self._thread is None or self.here():
            return True
        self._calls.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._thread = self.state.ident = None
        return True

    def _carried_out(
        self, call: Callable[[], Any], asked: StreamEvent | None
    ) -> tuple[Any, StreamEvent | None]:
        """Return the result of `call`, and the event that ends its work on a device."""
        if asked is None:
            return call(), None
        with self._streams.on(asked.device):
            asked.precede()
            return call(), StreamEvent(asked.device)

    def _run(self) -> None:
        _here.on_a_comm_thread = True
        sleep_exactly()
        while (entry := self._calls.get()) is not None:
            future, call, self.state.single = entry
            _carry_out(future, call)
            self.state.entries.popleft()
            del entry, future, call  # Otherwise the last operation's tensors stay alive until the next one.


def close_comm_threads(timeout: float, comm_threads: Iterable[CommThread] = _comm_threads) -> bool:
    """End `comm_threads`, by default all; return False if one was still busy after `timeout` seconds."""
    ordered = sorted(comm_threads, key=lambda comm_thread: comm_thread.number)
    for comm_thread in ordered:
        farewell, comm_thread.before_exit = comm_thread.before_exit, None
        if farewell is not None:
            farewell()
    closed = [comm_thread.close(timeout) for comm_thread in ordered]
    return all(closed)


def know_processor() -> None:
    """Compute the first square root of a process, before other threads can compute theirs.

    The first sqrt, tanh or exp makes MKL detect the processor. MKL in torch's wheels (2024.2) stores a
    provisional result before the final one. A thread that reads the provisional result computes with
    another kernel: sqrt in float64 is right to 10⁻¹¹ only, and tanh has other bits. Issue 188792 of
    pytorch/pytorch.
    """
    torch.ones(1, dtype=torch.float64, device="cpu").sqrt()


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - `wait()` raises it
        future.set_exception(error)
    else:
        future.set_result(result)
