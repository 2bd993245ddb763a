"""Connections whose other ends have not identified themselves yet.

Their number is limited, because any process can connect.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count

MOST = 1024
"""The largest number at once. Another limit is half of the number of files that the process may open."""


class PendingConnections:
    """The connections that are not identified yet; if there are too many, the oldest is closed.

    Clients that know the token identify themselves quickly, so the oldest connections are of other processes.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._leave: dict[int, Callable[[], None]] = {}
        self._numbers = count()
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._leave)

    @contextmanager
    def one_more(self, leave: Callable[[], None]) -> Generator[None, None, None]:
        """Count a connection as pending inside the block; `leave` closes it.

        `leave` is called if there are too many connections, perhaps on another thread.
        """
        number = next(self._numbers)
        too_many: list[Callable[[], None]] = []
        with self._changing:
            self._leave[number] = leave
            while len(self._leave) > max(1, min(self._most, _room())):
                too_many.append(self._leave.pop(next(iter(self._leave))))
        for sent_away in too_many:
            sent_away()
        try:
            yield
        finally:
            with self._changing:
                self._leave.pop(number, None)


def _room() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if files == resource.RLIM_INFINITY else files // 2
