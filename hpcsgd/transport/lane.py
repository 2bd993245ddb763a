"""A lane: one communication thread that carries out blocking calls in the order they were given.

The paper's framework does the same ("a communication-dedicated thread that performs blocking MPI
communications"): nonblocking MPI collectives make next to no progress while the owner computes.
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

from hpcsgd.transport.backend import PeerLost
from hpcsgd.transport.recording import Ledger

_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
_here = threading.local()  # .on_a_lane: the thread is a lane's
_numbers = itertools.count()


class Work:
    """Something under way on a lane."""

    def __init__(self, future: Future[Any], what: str, timeout: float, ledger: Ledger) -> None:
        self._future = future
        self._what = what
        self._timeout = timeout
        self._ledger = ledger

    def done(self) -> bool:
        """Whether `wait()` would return at once."""
        return self._future.done()

    def wait(self) -> Any:
        """Block until it is done and return its result.

        Raises `PeerLost` after the transport's timeout, and whatever the operation itself raised. Time
        that a lane waits for another one is not noted: its owner computes meanwhile.
        """
        start = time.perf_counter()
        try:
            return self._future.result(self._timeout)
        except FutureTimeout:
            if self._future.done():  # the operation's own TimeoutError, not ours
                raise
            raise PeerLost(f"{self._what}: no answer within {self._timeout:g} s") from None
        finally:
            if not getattr(_here, "on_a_lane", False):
                self._ledger.add(waited=time.perf_counter() - start)


def finished(call: Callable[[], Any], what: str, ledger: Ledger) -> Work:
    """`call` carried out here and now, as a `Work`."""
    future: Future[Any] = Future()
    _carry_out(future, call)
    return Work(future, what, 0.0, ledger)


class Lane:
    """Runs submitted calls one by one on a daemon thread, started with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.number = next(_numbers)
        self.farewell: Callable[[], None] | None = None
        """Called before lanes are closed, with all of them still at work, in the order in which they were
        made; collective. Raises `PeerLost` where others do not come."""
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        _lanes.add(self)

    def here(self) -> bool:
        """Whether the caller is the lane's own thread."""
        return threading.current_thread() is self._thread

    def submit(self, call: Callable[[], Any], what: str, timeout: float, ledger: Ledger) -> Work:
        """Queue `call`, which keeps the submitter's phase; from the lane's own thread it runs at once."""
        if self.here():
            return finished(call, what, ledger)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        context = contextvars.copy_context()
        self._calls.put((future, lambda: context.run(call)))
        return Work(future, what, timeout, ledger)

    def close(self, timeout: float) -> bool:
        """End the thread after what is queued; False if that took longer than `timeout` seconds."""
        if self._thread is None or self.here():
            return True
        self._calls.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        _here.on_a_lane = True
        while (entry := self._calls.get()) is not None:
            _carry_out(*entry)
            del entry  # or the last operation's tensors live on until the next


def close_lanes(timeout: float, lanes: Iterable[Lane] = _lanes) -> bool:
    """End these lanes, or every one of this process; False if one was still busy `timeout` seconds later."""
    ordered = sorted(lanes, key=lambda lane: lane.number)
    for lane in ordered:
        farewell, lane.farewell = lane.farewell, None
        if farewell is not None:
            farewell()
    closed = [lane.close(timeout) for lane in ordered]
    return all(closed)


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
        future.set_exception(error)
    else:
        future.set_result(result)
