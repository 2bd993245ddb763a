"""Step records that are still being gathered from all ranks, and the error for a loss that is not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hpcsgd.comm import Work
from hpcsgd.errors import JobError, UserError
from hpcsgd.report.step_timer import StepRecord, StepTimer

Tree = dict[str, Any]


class Readings:
    """The records of `meter` that are being gathered, in the same order on all ranks."""

    def __init__(self, meter: StepTimer) -> None:
        self._meter = meter
        self._under_way: deque[tuple[Tree, Work]] = deque()  # `taken` and the pending content of each record

    def begin(self, **taken: Any) -> None:
        """Begin to gather a record. `taken` has the fields that are known already, such as the `step`."""
        self._under_way.append((taken, self._meter.read()))

    def arrived(self, *, all_of_them: bool = False) -> Iterator[tuple[Tree, StepRecord]]:
        """Yield the records that have arrived, or all with `all_of_them`.

        Without `all_of_them` this does not wait, so that independent groups do not wait for each other.
        Records without any step are skipped. Raises `JobError` if the loss is not finite.
        """
        while self._under_way and (all_of_them or self._under_way[0][1].done()):
            taken, work = self._under_way.popleft()
            reading: StepRecord = work.wait()
            if not reading.samples:
                continue
            if not math.isfinite(reading.loss):  # all ranks have the same loss
                raise JobError(diverged("loss", reading.loss, taken["step"]))
            yield taken, reading


def require_finite(loss: Tensor, step: int) -> None:
    if not torch.isfinite(loss):
        raise UserError(diverged("loss", loss.item(), step))


def diverged(what: str, value: float, step: int) -> str:
    return f"the {what} is {value} at step {step}: try a lower learning rate or a longer warm-up"
