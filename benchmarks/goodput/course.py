"""One run of a contestant, undisturbed or with failures."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from goodput.contestants import CONTESTANTS, Contestant
from goodput.killer import Failure, Killer
from goodput.processes import kill_all, ranks_in, wait_for
from goodput.settings import Setting

START = 600.0
"""Seconds within which a contestant has to begin, enough even on a very busy machine."""


@dataclass(frozen=True)
class Course:
    """The result of a contestant's run."""

    seconds: float
    samples: int
    failures: int
    """The number of failures that killed at least one process."""
    restarts: list[float] = field(default_factory=list)
    """Seconds from a failure until the first process was back."""

    @property
    def rate(self) -> float:
        return self.samples / self.seconds

    @property
    def restart(self) -> float | None:
        return median(self.restarts) if self.restarts else None


def course(
    who: str, setting: Setting, window: float, checkpoint_steps: int, plan: Sequence[Failure] = ()
) -> Course:
    """Run a contestant for `window` seconds, counted from its first samples, with the failures of `plan`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        contestant = CONTESTANTS[who](folder, setting, checkpoint_steps)
        try:
            return _played(contestant, folder, setting, window, list(plan))
        except TimeoutError as error:
            printed = (folder / "printed").read_text(errors="replace").splitlines()[-20:]
            raise SystemExit("\n".join([*printed, f"{who}: {error}"])) from error
        finally:
            kill_all(folder)


def _played(
    contestant: Contestant, folder: Path, setting: Setting, window: float, plan: list[Failure]
) -> Course:
    contestant.start()
    wait_for(contestant.useful, contestant.keep, START)
    wait_for(lambda: len(ranks_in(folder, setting.K)) == setting.ranks, contestant.keep, START)
    killer = Killer(plan, lambda: ranks_in(folder, setting.K))
    began, before = time.time(), contestant.useful()
    while time.time() - began < window:
        contestant.keep()
        killer.look()
        time.sleep(0.05)
    made, seconds = contestant.useful() - before, time.time() - began
    return Course(seconds, made, len(killer.happened), _restarts(contestant, killer.happened))


def _restarts(contestant: Contestant, happened: Sequence[float]) -> list[float]:
    """Return the seconds from each failure to the first return of a process before the next failure."""
    found = []
    for at, end in pairwise([*happened, math.inf]):
        later = [moment - at for moment in contestant.back() if at < moment < end]
        if later:
            found.append(min(later))
    return found
