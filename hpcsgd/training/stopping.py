"""When a run must end early: a signal from the batch system, or its time limit."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch

from hpcsgd.topology import Job
from hpcsgd.transport import phase

STOPPED = 75
"""Exit code of a run that saved a checkpoint and can go on with --resume (EX_TEMPFAIL)."""

CHECK_EVERY = 1.0
"""Seconds between two times that the ranks ask each other."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopping:
    """Whether the ranks should stop now; all get the same answer at the same step.

    A signal may reach some ranks only, and any rank's clock may be ahead: from time to time one small
    allreduce settles it. How many steps lie between is agreed on in the same message.
    """

    def __init__(self, job: Job, time_limit: float | None) -> None:
        self._job = job
        self._started = time.monotonic()
        self._limit = float("inf") if time_limit is None else time_limit
        self._reason = 0
        self._steps = 0
        self._next = 1
        self._last_check = self._started
        for number in _SIGNALS:
            signal.signal(number, self._caught)

    def now(self) -> str | None:
        """Called by all ranks after each step: why to stop, or None."""
        self._steps += 1
        if self._steps < self._next:
            return None
        since = time.monotonic()
        per_step = max((since - self._last_check) / self._steps, 1e-6)
        if since - self._started > self._limit and not self._reason:
            self._reason = -1
        pause = min(int(CHECK_EVERY / per_step), 10_000)
        mine = torch.tensor([abs(self._reason), -max(pause, 1)])  # most urgent reason, shortest pause
        with phase("stopping"):
            self._job.world.allreduce(mine, "max").wait()
        self._steps, self._next, self._last_check = 0, -int(mine[1]), since
        return _told(int(mine[0]))

    def _caught(self, number: int, _: FrameType | None) -> None:
        self._reason = number


def _told(reason: int) -> str | None:
    if reason == 0:
        return None
    return "time limit reached" if reason == 1 else f"{signal.Signals(reason).name} received"
