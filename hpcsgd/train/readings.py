"""What the meter reads, on its way from all ranks to whoever tells it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

from hpcsgd.comm import Work
from hpcsgd.errors import JobError
from hpcsgd.report.step_timer import StepRecord, StepTimer
from hpcsgd.train.divergence import diverged

Tree = dict[str, Any]


class Readings:
    """Of `meter`, in the order in which they were taken; the same ones on all ranks."""

    def __init__(self, meter: StepTimer) -> None:
        self._meter = meter
        self._under_way: deque[tuple[Tree, Work]] = deque()  # when they were taken, what they say

    def begin(self, **taken: Any) -> None:
        """Take one; `taken` says when, beginning with the `step`."""
        self._under_way.append((taken, self._meter.read()))

    def arrived(self, *, all_of_them: bool = False) -> Iterator[tuple[Tree, StepRecord]]:
        """Those that have, or all: groups that wait for nobody do not wait for each other here. Without
        those in which nothing was done. Raises `JobError` where the model has come to nothing."""
        while self._under_way and (all_of_them or self._under_way[0][1].done()):
            taken, work = self._under_way.popleft()
            reading: StepRecord = work.wait()
            if not reading.samples:
                continue
            if not math.isfinite(reading.loss):  # the same on all ranks
                raise JobError(diverged("loss", reading.loss, taken["step"]))
            yield taken, reading
