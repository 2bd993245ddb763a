"""An operation that the calling thread begins itself and polls when it waits.

A communication thread executes one call after another. A posted operation runs at the same time as these
calls, so that its caller only waits for the last rank that posts it.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from hpcsgd.comm.backend import Ending
from hpcsgd.comm.rank_watch import Operation, ThreadState


class Posted(Future[Any]):
    """The future of an operation in progress, whose result is `received` when it has ended.

    `place` stands for a communication thread that executes the `operation`. The rank's watch reads from it
    what the waiting thread waits for.
    """

    def __init__(
        self, ends: Ending, received: bytearray, place: ThreadState, operation: Operation | None
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
        """Wait for the operation; return the bytes that were received, and None.

        `Work` expects a pair: a result, and the event that ends its work on a device. Here there is no event.

        Raises:
            TimeoutError: After `timeout` seconds.
        """
        if not self._ended(math.inf if timeout is None else timeout):
            raise FutureTimeout
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return None, because an operation that fails raises its error in `result`."""
        return None

    def _ended(self, seconds: float) -> bool:
        if super().done():
            return True
        if not self._ends(seconds):
            return False
        with self._settling:  # the waiting thread and the watching thread may both find the end
            if not super().done():
                self.set_result((bytes(self._received), None))
        return True
