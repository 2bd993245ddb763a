"""How far others get while one rank does nothing, whether ranks are threads or processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hpcsgd.comm import Communicator

PATIENCE = 60.0  # seconds; the machine may be busy
LONGER = 1.8  # seconds in which a step more would be made


def others_made(
    world: Communicator, folder: Path, step: Callable[[int], object], steps: range, ahead: int
) -> int:
    """All of two ranks make these steps; the second one when the first has made `ahead` of them and does not
    go on. On the second rank: how many the first had made by then."""
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
