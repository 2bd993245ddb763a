"""How many others want this machine's cores while we measure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
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
    return sum(_runnable(each, proc) for each in (pid, *descendants(pid, proc)))


def descendants(pid: int, proc: Path = PROC) -> Iterator[int]:
    """A process's children, their children, and so on."""
    for child in _children(pid, proc):
        yield child
        yield from descendants(child, proc)


def _runnable(pid: int, proc: Path) -> int:
    count = 0
    with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for thread in (proc / str(pid) / "task").iterdir():
            count += _stat(thread)[0] == "R"
    return count


def _children(pid: int, proc: Path) -> list[int]:
    """As the kernel tells them, or where it does not (CONFIG_PROC_CHILDREN), by who has which parent."""
    files = list((proc / str(pid) / "task").glob("*/children"))
    if not files and any(proc.glob("self/task/*/children")):
        return []  # it has just ended
    found: list[int] = []
    for file in files:
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, file.read_text().split())
    return found if files else [each for each, parent in _parents(proc) if parent == pid]


def _parents(proc: Path) -> Iterator[tuple[int, int]]:
    """Every process, and who its parent is."""
    for folder in proc.glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield int(folder.name), int(_stat(folder)[1])


def _stat(folder: Path) -> list[str]:
    """State, parent and so on: what comes after the name, which is in brackets and may hold anything."""
    return (folder / "stat").read_text().rpartition(")")[2].split()
