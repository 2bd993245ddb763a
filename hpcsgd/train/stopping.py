"""Reasons to end a run early: a signal, the run's time limit, or the end of its batch job."""

from __future__ import annotations

import logging
import os
import signal
import time
from types import FrameType

import torch
from torch import Tensor

from hpcsgd.comm import Communicator, Work, phase
from hpcsgd.train.job_end import seconds_left

log = logging.getLogger(__name__)

CHECK_EVERY = 1.0
"""Seconds between two checks in which the ranks communicate."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_TIME_LIMIT, _JOB_END = 1, 2  # reasons in addition to the signals, with smaller numbers
_FAILURE = 1000  # more urgent than any signal
FAILED = "a rank has failed"
"""The reason to stop if any rank `has_failed`."""


class Reasons:
    """The reasons to stop that this process notices, from the time when this object is made.

    These are a signal, the time limit, and the end of the batch job, if this process asks the scheduler.
    """

    def __init__(self, time_limit: float | None, stop_ahead: float, *, asks_scheduler: bool) -> None:
        started = time.monotonic()
        self._signal = 0
        self._deadlines: list[tuple[float, int]] = []
        if time_limit is not None:
            self._deadlines.append((started + time_limit, _TIME_LIMIT))
        if asks_scheduler and (left := seconds_left(os.environ)) is not None:
            ahead = min(stop_ahead, left / 10)
            self._deadlines.append((started + left - ahead, _JOB_END))
            log.info("this batch job ends in %.0f s; if need be, the run stops %.0f s before", left, ahead)
        for number in _SIGNALS:
            signal.signal(number, self._caught)

    def now(self) -> int:
        """Return the number of a reason to stop now, or 0. If there are several, return the largest."""
        over = [reason for deadline, reason in self._deadlines if time.monotonic() > deadline]
        return max([self._signal, *over])

    def _caught(self, number: int, _: FrameType | None) -> None:
        self._signal = number


class Stopping:
    """The decision of all ranks whether to stop, the same on all ranks at the same step.

    A signal may reach some ranks only, and clocks of ranks differ. So from time to time a small allreduce
    decides. The allreduce also fixes the number of steps until the next one. Its result is read only then, so
    that no rank waits for it. `control` is a communicator with its own thread.
    """

    def __init__(self, reasons: Reasons, control: Communicator) -> None:
        self._reasons = reasons
        self._control = control
        self._asked: tuple[Tensor, Work] | None = None
        self._steps = 0
        self._next = 1
        self._last_check = time.monotonic()
        self.has_failed = False
        """True if this rank cannot go on, for which the other ranks stop."""

    def now(self) -> str | None:
        """Return the reason to stop, as text, or None to continue; all ranks call this after each step."""
        self._steps += 1
        if self._steps < self._next:
            return None
        with phase("stopping"):
            if (reason := self._answer()) is None:
                self._ask()
        return reason

    def at_once(self) -> str | None:
        """Return the reason to stop that any rank has now, as text, or None to continue. Collective."""
        if (reason := self._answer()) is None:
            self._ask()
            reason = self._answer()
        return reason

    def _ask(self) -> None:
        now = time.monotonic()
        per_step = max((now - self._last_check) / max(self._steps, 1), 1e-6)
        pause = min(int(CHECK_EVERY / per_step), 10_000)
        # The maxima are the most urgent reason and the shortest pause.
        reason = _FAILURE if self.has_failed else self._reasons.now()
        mine = torch.tensor([reason, -max(pause, 1)], device="cpu")
        self._asked = mine, self._control.allreduce(mine, "max")
        self._steps, self._last_check = 0, now

    def _answer(self) -> str | None:
        """Return the reason to stop that the last allreduce found, or None."""
        if self._asked is None:
            return None
        reported, asked = self._asked
        asked.wait()
        self._next = -int(reported[1])
        return _reported(int(reported[0]))


def _reported(reason: int) -> str | None:
    reported = {
        0: None, _TIME_LIMIT: "time limit reached", _JOB_END: "the batch job ends soon", _FAILURE: FAILED,
    }  # fmt: skip
    return reported[reason] if reason in reported else f"{signal.Signals(reason).name} received"


def saved_at(t: int) -> str:
    """Return the log text of a run that has saved a checkpoint of step t and stops."""
    return f"saved step {t}, go on with --resume"
