"""The progress of a run: one log line per report, or a live bar on a terminal."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

logger = logging.getLogger(__name__)


class Progress:
    """The display of steps and notes: lines of `logging`, or a bar if stdout is a terminal.

    With a bar, lines are logged as DEBUG, for the log file only. Ranks other than 0, which do not log, draw
    no bar either, because some launchers give each rank a terminal.
    """

    def __init__(
        self, total_steps: int, total_epochs: int, *, first_step: int = 0, console: Console | None = None
    ) -> None:
        """Start at ``first_step``, so that steps before a resume do not count for the remaining time."""
        self._total_steps = total_steps
        self._total_epochs = total_epochs
        self._first_step = first_step
        self._started = time.monotonic()
        watched = (sys.stdout if console is None else console.file).isatty()
        live = watched and logger.isEnabledFor(logging.INFO)
        self._level = logging.DEBUG if live else logging.INFO
        self._bar = _bar(console) if live else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total_steps, completed=first_step, state="")

    def step(self, *, step: int, epoch: int, loss: float, lr: float, speed: str) -> None:
        """Report that ``step`` of the whole run, in ``epoch``, is done. Both numbers begin at 1."""
        place = f"epoch {epoch}/{self._total_epochs}  step {step}/{self._total_steps}"
        state = f"loss {loss:.4g}  lr {lr:.4g}  {speed}  eta {self._eta(step)}"
        logger.log(self._level, "%s  %s", place, state)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=place, state=state)

    def expect(self, total_steps: int) -> None:
        """Set the expected number of steps of the run. It grows for groups that outlive others."""
        self._total_steps = total_steps
        if self._bar is not None:
            self._bar.update(self._task, total=total_steps)

    def note(self, text: str) -> None:
        """Report a separate line, such as the result of an evaluation."""
        logger.log(self._level, "%s", text)
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)

    def _eta(self, step: int) -> timedelta:
        per_step = (time.monotonic() - self._started) / max(1, step - self._first_step)
        days, seconds = divmod(round(per_step * (self._total_steps - step)), 24 * 60 * 60)
        return timedelta(min(days, timedelta.max.days - 1), seconds)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(console: Console | None) -> Bar:
    from rich.progress import BarColumn, TextColumn  # ranks without a bar need not load rich
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}")
    return Bar(*columns, console=console)
