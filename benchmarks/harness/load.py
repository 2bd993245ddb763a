"""Measure how many threads of other programs want this machine's cores during a measurement."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from threading import Event, Thread

PROC = Path("/proc")
EVERY = 1.0
"""Seconds between two samples; a sample takes some tenths of a millisecond per process of ours."""


class Load:
    """The load without us: the mean number of other programs' threads that run or wait for a core.

    CPU time would say less: the more ranks we have, the less of it the others get, however many they are.
    Our threads are those of this process, of all its descendants, and of all processes of the Slurm job
    that this process runs in: slurmd may have started them on this machine.
    """

    def __init__(self, look: Callable[[], int] | None = None, every: float = EVERY) -> None:
        self.before = os.getloadavg()[0]
        """The load average of the last minute, over all processes."""
        self._look = look or others_runnable
        self._seen = [self._look()]
        self._ended = Event()
        self._thread = Thread(target=self._go_on, args=[every], daemon=True)
        self._thread.start()

    def without_us(self) -> float:
        """Return the mean load without us from the beginning until now."""
        return max(fmean(self._seen), 0.0)

    def end(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self._thread.join()

    def _go_on(self, every: float) -> None:
        while not self._ended.wait(every):
            self._seen.append(self._look())


def others_runnable(proc: Path = PROC) -> int:
    """Return the number of other programs' threads that run or wait for a core.

    A thread of ours that wakes up or falls asleep during the count is added to theirs or subtracted from
    them. So only the mean over many samples is meaningful.
    """
    everybody = int((proc / "loadavg").read_text().split()[3].partition("/")[0])
    return everybody - runnable(os.getpid(), proc, os.environ.get("SLURM_JOB_ID"))


def runnable(pid: int, proc: Path = PROC, job: str | None = None) -> int:
    """Return how many threads of `pid`, its descendants and the Slurm job `job` run or wait for a core."""
    ours = {pid, *descendants(pid, proc), *(of_job(job, proc) if job else ())}
    return sum(_runnable(each, proc) for each in ours)


def of_job(job: str, proc: Path = PROC) -> Iterator[int]:
    """Yield the processes of this user whose environment names the Slurm job with the number `job`."""
    for folder in proc.glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if f"SLURM_JOB_ID={job}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def descendants(pid: int, proc: Path = PROC) -> Iterator[int]:
    """Yield a process's children, their children, and so on."""
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
    """Return the children of a process.

    Without the kernel's option CONFIG_PROC_CHILDREN they are found by the parents of all processes.
    """
    files = list((proc / str(pid) / "task").glob("*/children"))
    if not files and any(proc.glob("self/task/*/children")):
        return []  # it has just ended
    found: list[int] = []
    for file in files:
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, file.read_text().split())
    return found if files else [each for each, parent in _parents(proc) if parent == pid]


def _parents(proc: Path) -> Iterator[tuple[int, int]]:
    """Yield every process together with its parent."""
    for folder in proc.glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield int(folder.name), int(_stat(folder)[1])


def _stat(folder: Path) -> list[str]:
    """Return state, parent and so on: the fields after the name, which may contain spaces and brackets."""
    return (folder / "stat").read_text().rpartition(")")[2].split()
