"""An operation that the calling thread begins itself, and for whose end it looks when it waits.

A lane carries out one call after another. What is posted goes on beside them: it costs its caller no more
than the wait for the last rank that posts it.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from hpcsgd.comm.backend import Ending
from hpcsgd.comm.comm_thread import CommThread
from hpcsgd.comm.rank_watch import Operation


class Posted(Future[Any]):
    """What an operation under way will have `received` when it has ended.

    `place` is a lane without a thread: whoever watches the rank finds there which `operation` a thread waits
    for.
    """

    def __init__(
        self, ends: Ending, received: bytearray, place: CommThread, operation: Operation | None
    ) -> None:
        super().__init__()
        self._ends, self._received = ends, received
        self._settling = threading.Lock()
        place.single = True
        place.executing = operation

    def done(self) -> bool:
        """Return whether `result` would return at once."""
        return self._ended(0.0)

    def result(self, timeout: float | None = None) -> tuple[Any, None]:
        """Return what was received, and that it is on no device.

        Raises:
            TimeoutError: After `timeout` seconds.
        """
        if not self._ended(math.inf if timeout is None else timeout):
            raise FutureTimeout
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return None: what fails does so in `result`."""
        return None

    def _ended(self, seconds: float) -> bool:
        if super().done():
            return True
        if not self._ends(seconds):
            return False
        with self._settling:  # the thread that waits and the one that watches it may both find the end
            if not super().done():
                self.set_result((bytes(self._received), None))
        return True
