"""Collection of objects that nothing uses any more, before one is reported as being in use."""

from __future__ import annotations

import gc
import threading

_collecting = threading.Lock()
"""A lock for garbage collections: one that begins while another thread runs one would do nothing."""


def collect_garbage() -> None:
    """Free objects that only refer to each other, as an optimizer and its own hooks do."""
    with _collecting:
        gc.collect()
