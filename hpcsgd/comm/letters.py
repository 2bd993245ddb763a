"""Messages of gloo that nobody waits for: those that have come before somebody asks, and those that leave."""

from __future__ import annotations

import contextlib
import queue
import threading
from datetime import timedelta
from typing import Any

from torch import Tensor

from hpcsgd.comm.backend import ANY

FOR_EVER = timedelta(days=365)


class Letters:
    """Of one rank on one communicator, from itself and from whoever sends first, in the order in which they
    came."""

    def __init__(self) -> None:
        self._come: list[tuple[int, Tensor]] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, sender: int, x: Tensor) -> None:
        """Add one, which nobody else uses from now on."""
        with self._changed:
            self._come.append((sender, x))
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """From now on nothing comes any more; who waits gets this."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def take(self, source: int) -> tuple[int, Tensor]:
        """Wait for one of `source`, or for any; the sender and what it sent."""
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
    """Messages under way, which their sender need not wait for: gloo sends them when they are asked for. A
    thread keeps them until they have left."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: Any) -> None:
        """Keep this one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="outbox", daemon=True)
            self._thread.start()
        self._works.put(work)

    def close(self, timeout: float) -> None:
        """When all have left, or after so many seconds."""
        if self._thread is not None:
            self._works.put(None)
            self._thread.join(timeout)

    def _wait(self) -> None:
        while (work := self._works.get()) is not None:
            with contextlib.suppress(RuntimeError):  # whoever talks to that rank again hears that it is gone
                work.wait(FOR_EVER)
            del work
