"""A watch that notices if work on a device's stream does not finish, as when another rank is gone.

Some libraries return at once, and only the device waits for other ranks. If a rank is gone, the next thread
that waits for the device would otherwise wait forever.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

_LONGEST_PAUSE = 1.0  # seconds between two checks


class _Operation(NamedTuple):
    what: str
    done: Callable[[], bool]


class Watch:
    """A watch that calls `lost` once, with an operation's name, if it takes more than `timeout` seconds.

    Operations are done in the order in which they are added. The time of an operation starts when it has been
    added and all earlier ones are done.
    """

    def __init__(self, timeout: float, lost: Callable[[str], None]) -> None:
        self._timeout, self._lost = timeout, lost
        self._under_way: deque[_Operation] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, what: str, done: Callable[[], bool]) -> None:
        """Watch another operation; the first one starts a thread."""
        with self._changed:
            self._under_way.append(_Operation(what, done))
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching operations."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while (operation := self._next()) is not None:
            if not self._in_time(operation):
                self._lost(operation.what)
                return

    def _next(self) -> _Operation | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._under_way))
            return None if self._closed else self._under_way.popleft()

    def _in_time(self, operation: _Operation) -> bool:
        start = time.monotonic()
        while not (operation.done() or self._closed):
            elapsed = time.monotonic() - start
            if elapsed > self._timeout:
                return False
            time.sleep(min(self._timeout / 10, _LONGEST_PAUSE, 1e-3 + elapsed / 10))
        return True
