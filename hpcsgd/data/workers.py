"""Data workers that outlive the signals of a batch system.

A batch system warns all processes of a job, by SIGUSR1 or SIGTERM. The rank saves and leaves; until then it
needs its workers, and Python's two processes behind them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import Any

from hpcsgd.data.arguments import whole_number
from hpcsgd.errors import UserError, count_text

PER_CORE = 64
"""Workers of a rank for each core of its node, at most."""
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


def require_workers(given: Any, name: str = "workers") -> int:
    """Return how many they are; `name` is what they are called where they are given. Raise `UserError` for
    more than any use could be made of: their processes would fill the memory of the node."""
    workers, cores = whole_number(name, given), os.cpu_count() or 1
    if workers > PER_CORE * cores:
        raise UserError(
            f"{name} = {workers}: expected at most {PER_CORE * cores}, {PER_CORE} for each of the "
            f"{count_text(cores, 'core')} of this node",
            key=name,
            value=workers,
        )
    return workers


def start_fork_server() -> None:
    """Start the process that workers are forked from, with these signals blocked; workers inherit that."""
    with _blocked():
        resource_tracker.ensure_running()  # in Python 3.11 this unblocks SIGTERM
    with _blocked():
        forkserver.ensure_running()


def end_by_owner_alone(owner: int, _: int) -> None:
    """In a worker: SIGTERM ends it only where the process `owner` sends it, as Python does when it exits."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the fork server may be an older one of somebody else
    threading.Thread(target=_wait_for, args=(owner,), name="end by the owner", daemon=True).start()


def _wait_for(owner: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != owner:
        pass
    os._exit(0)


@contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
