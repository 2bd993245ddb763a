"""The program of a logger's process, which ends when its stdin is closed or says so; see `processes`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from hpcsgd.report.loggers import LoggerRun, make_logger_of

AT_ONCE = 1 << 20
"""Maximum number of bytes of one read from stdin."""
LEFT_ALONE = 20.0
"""Seconds from the end of the run's process to the forced end of the logger."""


def main() -> None:
    """Start the logger that the first line of stdin describes, and pass it the records that follow.

    A last line, true or false, says whether the run has died.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _not_for_us)
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    lines = sys.stdin.buffer
    first = json.loads(lines.readline())
    logger = make_logger_of(first["logger"])(LoggerRun(**first["run"]))
    failed = None
    for batch in _batches(lines):
        if isinstance(batch[-1], bool):
            failed = batch.pop()
        if batch:
            logger.write(batch)
        if failed is not None:
            break
    logger.close(failed is not False)


def _not_for_us(number: int, frame: object) -> None:
    """Handle a signal by doing nothing.

    If signals were ignored instead, processes that a logger starts would ignore them, too.
    """


def _batches(lines: BinaryIO) -> Iterator[list[Any]]:
    """Yield lists of lines, decoded from JSON, as they arrive. An incomplete last line is left out."""
    begun = b""
    while some := lines.read1(AT_ONCE):  # pyright: ignore[reportAttributeAccessIssue]
        *whole, begun = (begun + some).split(b"\n")
        if whole:
            yield [json.loads(line) for line in whole]


def _end_after(parent: int) -> None:
    """End this process `LEFT_ALONE` seconds after its parent has ended, even if the logger hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(LEFT_ALONE)
    os._exit(1)


if __name__ == "__main__":
    main()
