"""Timer slack: by how much Linux may extend each sleep of a thread, by default 50 µs."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Generator

_SET, _GET = 29, 30  # PR_SET_TIMERSLACK and PR_GET_TIMERSLACK, options of prctl
_DEFAULT = 50_000  # ns; a thread that an exact one starts inherits 1 ns as its own default


def sleep_exactly() -> None:
    """Make sleeps of the calling thread end on time: 50 µs are long compared with a short message."""
    _prctl(_SET, 1)


@contextlib.contextmanager
def default_slack() -> Generator[None]:
    """Within the block, Linux may extend sleeps of the calling thread as it does by default."""
    before = slack()
    _prctl(_SET, _DEFAULT)
    try:
        yield
    finally:
        _prctl(_SET, before)


def slack() -> int:
    """Return the timer slack of the calling thread, in ns."""
    return _prctl(_GET, 0)


def _prctl(option: int, value: int) -> int:
    return ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
