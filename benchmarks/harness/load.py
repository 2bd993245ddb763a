"""How many others want this machine's cores while we measure."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from threading import Event, Thread

PROC = Path("/proc")
EVERY = 1.0
"""Seconds from one look to the next; a look takes some tenths of a millisecond a process of ours."""


class Load:
    """The load without us: what is running or waiting for a core and is not ours, in the mean over looks.

    CPU time would say less: the more ranks we have, the less of it others get, however many they are. Ours is
    this process and all that it has started, on whatever level.
    """

    def __init__(self, look: Callable[[], int] | None = None, every: float = EVERY) -> None:
        self.before = os.getloadavg()[0]
        """The mean of the last minute, of everybody."""
        if look is None and not any(PROC.glob("self/task/*/children")):
            raise SystemExit("this kernel does not say who started what (CONFIG_PROC_CHILDREN)")
        self._look = look or others_runnable
        self._seen = [self._look()]
        self._ended = Event()
        self._thread = Thread(target=self._go_on, args=[every], daemon=True)
        self._thread.start()

    def without_us(self) -> float:
        """Until now."""
        return max(fmean(self._seen), 0.0)

    def end(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def _go_on(self, every: float) -> None:
        while not self._ended.wait(every):
            self._seen.append(self._look())


def others_runnable(proc: Path = PROC) -> int:
    """Threads of others that run or wait for a core. One of ours that wakes up or falls asleep meanwhile is
    taken for theirs, or from them: it is the mean over looks that says something."""
    everybody = int((proc / "loadavg").read_text().split()[3].partition("/")[0])
    return everybody - runnable(os.getpid(), proc)


def runnable(pid: int, proc: Path = PROC) -> int:
    """Threads of this process and of all that descend from it that run or wait for a core."""
    count = 0
    try:
        for thread in (proc / str(pid) / "task").iterdir():
            # The name, in brackets, may hold anything; the state comes after it.
            count += (thread / "stat").read_text().rpartition(")")[2].split()[0] == "R"
            count += sum(runnable(int(child), proc) for child in (thread / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        pass
    return count
