"""The progress of a conversion on stderr: a line that is rewritten in a terminal, else many lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta

from hpcsgd.errors import count_text

WATCHED, UNWATCHED = 0.5, 10.0
"""Seconds between two progress lines: `WATCHED` in a terminal, `UNWATCHED` otherwise."""


def progress_of() -> Callable[[int, int], None]:
    """Return a function that prints progress from its arguments, the images done and their total number."""
    watched = sys.stderr.isatty()
    every = WATCHED if watched else UNWATCHED
    begun = last = time.monotonic()
    first: int | None = None

    def progress(done: int, everything: int) -> None:
        nonlocal last, first
        now = time.monotonic()
        first = done if first is None else first
        ended = done == everything
        if now - last < every and not ended:
            return
        last = now
        speed = (done - first) / max(now - begun, 1e-9)
        left = "" if ended or not speed else f", {timedelta(seconds=round((everything - done) / speed))} left"
        line = f"{done:,} of {count_text(everything, 'image')}{left}"
        print(f"\r{line:<60}" if watched else line, end="\n" if ended or not watched else "", file=sys.stderr)

    return progress
