"""Wait until the launcher has read what this process printed into its pipes."""

from __future__ import annotations

import fcntl
import os
import stat
import termios
import time

LISTENED = 1.0
"""The most seconds that a launcher gets to read what was printed."""


def wait_for_readers(*files: int) -> None:
    """Wait until pipes among `files` have been read, as a launcher may discard unread output at an abort."""
    deadline = time.monotonic() + LISTENED
    while any(unread(file) for file in files) and time.monotonic() < deadline:
        time.sleep(1e-3)


def unread(file: int) -> bool:
    """Return True if `file` is a pipe with unread data."""
    try:
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            return any(fcntl.ioctl(file, termios.FIONREAD, bytes(4)))
    except OSError:  # it is closed
        pass
    return False
