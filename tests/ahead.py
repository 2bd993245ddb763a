"""Measure how many steps a rank makes while the other one waits. Ranks may be threads or processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hpcsgd.comm import Communicator

PATIENCE = 60.0  # seconds; the machine may be busy
LONGER = 1.8  # seconds, in which the rank would make another step if it could


def others_made(
    world: Communicator, folder: Path, step: Callable[[int], object], steps: range, ahead: int
) -> int:
    """Make `steps` on two ranks and return how far ahead rank 0 was when rank 1 began.

    Rank 1 begins when rank 0 has made at least `ahead` steps and has had time for more.

    Returns:
        On rank 1 the number of steps that rank 0 had made by then; on rank 0 the number 0.
    """
    seen = 0
    if world.rank == 1:
        wait_for(lambda: made(folder) >= ahead)
        time.sleep(LONGER)
        seen = made(folder)
    for t in steps:
        step(t)
        if world.rank == 0:
            (folder / f"made-{t}").touch()
    return seen


def made(folder: Path) -> int:
    return len([*folder.glob("made-*")])


def wait_for(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, "it would have waited for ever"
        time.sleep(0.01)
