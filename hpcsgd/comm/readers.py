"""Whoever reads what this process prints: a launcher."""

from __future__ import annotations

import fcntl
import os
import stat
import termios
import time

LISTENED = 1.0
"""Seconds that a launcher has to read what was printed, at most."""


def wait_for_readers(*files: int) -> None:
    """A launcher that hears of an abort may not care any more for what it was to print."""
    deadline = time.monotonic() + LISTENED
    while any(unread(file) for file in files) and time.monotonic() < deadline:
        time.sleep(1e-3)


def unread(file: int) -> bool:
    """Whether `file` is a pipe with something in it."""
    try:
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            return any(fcntl.ioctl(file, termios.FIONREAD, bytes(4)))
    except OSError:  # it is closed
        pass
    return False
