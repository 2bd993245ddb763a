"""Windows (ranges of consecutive steps), such as those that a run traces."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcsgd.errors import UserError

AUTO = "auto"
LENGTH = 8
"""The number of steps in a window of "auto"."""
SETTLED = 2
"""The number of steps after a start that "auto" skips, because the first steps allocate buffers."""
_WINDOW = re.compile(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?")


def windows(text: str, done: int = 0) -> Iterator[range]:
    """Return the windows that start after step `done`, in order.

    `text` is a list such as "10-17, 500", or "auto": soon after the start, and then from steps 100, 1000, …
    on. Raises `UserError` at once if `text` is neither.
    """
    given = _decades(done) if text == AUTO else iter(_given(text))
    return (window for window in given if window.start > done)


def _decades(done: int) -> Iterator[range]:
    first = done + SETTLED + 1
    yield range(first, first + LENGTH)
    for power in range(2, 16):
        if 10**power > first + LENGTH:
            yield range(10**power, 10**power + LENGTH)


def _given(text: str) -> list[range]:
    found: list[range] = []
    for part in text.split(","):
        match = _WINDOW.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not (found[-1].stop if found else 1) <= first <= last:
            raise UserError(
                f'trace_steps = "{text}": expected steps from 1 on, in order, as "10-17, 500", or "{AUTO}"',
                key="trace_steps",
            )
        found.append(range(first, last + 1))
    return found
