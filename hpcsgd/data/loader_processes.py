"""Loader processes that survive the signals of a batch system.

A batch system warns all processes of a job by SIGUSR1 or SIGTERM. A rank then saves a checkpoint and ends.
Until then it needs its loader processes, and the two processes of Python that serve them.
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
"""Maximum number of loader processes of a rank for each core of its node."""
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


def require_num_workers(given: Any) -> int:
    """Return the number of loader processes that the user gave as `num_workers`.

    Raises `UserError` for more than `PER_CORE` per core, because they would fill the memory of the node, and
    for anything that is not a whole number ≥ 0.
    """
    num_workers, cores = whole_number("num_workers", given), os.cpu_count() or 1
    if num_workers > PER_CORE * cores:
        raise UserError(
            f"num_workers = {num_workers}: expected at most {PER_CORE * cores}, {PER_CORE} for each of the "
            f"{count_text(cores, 'core')} of this node",
            key="num_workers",
            value=num_workers,
        )
    return num_workers


def start_fork_server() -> None:
    """Start the process from which loader processes are forked; `_SIGNALS` are blocked in all of them."""
    with _blocked():
        resource_tracker.ensure_running()  # in Python 3.11 this unblocks SIGTERM
    with _blocked():
        forkserver.ensure_running()


def end_by_owner_alone(owner: int, _: int) -> None:
    """Let SIGTERM end this loader process only if the process `owner` sends it, as Python does at exit."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # an older fork server may have been started elsewhere
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
