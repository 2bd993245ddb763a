"""Messages by gloo that no call waits for: received early, or still being sent after `send` returned."""

from __future__ import annotations

import contextlib
import queue
import threading
from datetime import timedelta
from typing import Any

from torch import Tensor

from hpcsgd.comm.backend import ANY

FOR_EVER = timedelta(days=365)


class Inbox:
    """The messages received on one communicator, from any rank, in order of arrival."""

    def __init__(self) -> None:
        self._come: list[tuple[int, Tensor]] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, sender: int, x: Tensor) -> None:
        """Add the message `x` of rank `sender`; the caller must not use `x` any more."""
        with self._changed:
            self._come.append((sender, x))
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make every `take` without a message raise `error` from now on."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def take(self, source: int) -> tuple[int, Tensor]:
        """Wait for a message from `source`, or from any rank; return the sender and the message."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._first(source) is not None)
            if (place := self._first(source)) is not None:
                return self._come.pop(place)
            assert self._error is not None
            raise self._error

    def _first(self, source: int) -> int | None:
        places = (i for i, (sender, _) in enumerate(self._come) if source in (ANY, sender))
        return next(places, None)


class Outbox:
    """Messages being sent, for which no call waits; gloo completes a send only at its receipt.

    A thread keeps the memory of each message until it has been sent.
    """

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: Any) -> None:
        """Keep `work`, a send in progress, until it is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="outbox", daemon=True)
            self._thread.start()
        self._works.put(work)

    def close(self, timeout: float) -> None:
        """Return when all messages have been sent, or after `timeout` seconds."""
        if self._thread is not None:
            self._works.put(None)
            self._thread.join(timeout)

    def _wait(self) -> None:
        while (work := self._works.get()) is not None:
            # the next operation with that rank raises an error anyway
            with contextlib.suppress(RuntimeError):
                work.wait(FOR_EVER)
            del work
