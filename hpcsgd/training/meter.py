"""What happened between two reports: loss, speed, and where time and bytes went."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hpcsgd.errors import JobError
from hpcsgd.topology import Job
from hpcsgd.transport import phase


@dataclass(frozen=True)
class Reading:
    """Over all ranks: `loss` is the mean per sample. Over this rank: seconds and bytes of each phase."""

    loss: float
    samples: int
    samples_per_s: float
    phase_seconds: dict[str, float]
    phase_bytes: dict[str, float]


class Meter:
    """Adds up steps until it is read."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._data_seconds = 0.0
        self._sums = torch.zeros(2, dtype=torch.float64)  # loss · samples, samples
        self._totals = job.world.ledger.totals()
        self._since = time.perf_counter()

    def step(self, loss: torch.Tensor, samples: int, data_seconds: float) -> None:
        """Count one step: its mean loss over `samples` of this rank, and how long it waited for them."""
        self._sums[0] += loss.detach() * samples
        self._sums[1] += samples
        self._data_seconds += data_seconds

    def pause(self) -> None:
        """What came since the last reading (an evaluation, a checkpoint) does not count."""
        self._totals = self._job.world.ledger.totals()
        self._since = time.perf_counter()

    def read(self, step: int) -> Reading:
        """What came since the last reading; collective. Raises `JobError` if the loss is not finite."""
        grown = self._job.world.ledger.since(self._totals)
        elapsed = time.perf_counter() - self._since
        sums = self._sums.clone()
        with phase("metrics"):
            self._job.world.allreduce(sums).wait()
        total, samples = sums.tolist()
        if not torch.isfinite(sums[0]):
            raise JobError(f"the loss is {total} at step {step}: lower the learning rate or warm up longer")
        seconds = {name: total.waited for name, total in grown.items()} | {"data": self._data_seconds}
        seconds["compute"] = max(elapsed - sum(seconds.values()), 0.0)
        bytes_sent = {name: total.bytes for name, total in grown.items() if total.bytes}
        self._sums.zero_()
        self._data_seconds = 0.0
        self.pause()
        return Reading(total / max(samples, 1), int(samples), samples / elapsed, seconds, bytes_sent)
