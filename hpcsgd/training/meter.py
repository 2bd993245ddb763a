"""What happened between two reports: loss, speed, and where time and bytes went."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd.errors import JobError
from hpcsgd.topology import Job
from hpcsgd.transport import phase

COUNTED = ("staleness", "ahead")
"""Notes of a method that come in small whole numbers."""
LARGEST = 63
"""Of them; more counts as so much."""


@dataclass(frozen=True)
class Reading:
    """Over all ranks: `loss`, the mean per sample, and how often a method noted which number. Over this rank:
    seconds and bytes of each phase, and bytes of messages to each rank of its cross communicator."""

    loss: float
    samples: int
    samples_per_s: float
    phase_seconds: dict[str, float]
    phase_bytes: dict[str, float]
    link_bytes: dict[int, float]
    counts: dict[str, dict[int, int]]


class Meter:
    """Adds up steps until it is read."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._data_seconds = 0.0
        self._sums = torch.zeros(2, dtype=torch.float64)  # loss · samples, samples
        self._counts: dict[str, Tensor] = {}  # the same methods note the same on all ranks
        self.pause()

    def step(self, loss: Tensor, samples: int, data_seconds: float, notes: Mapping[str, float]) -> None:
        """Count one step: its mean loss over `samples` of this rank, how long it waited for them, and what
        the method noted."""
        self._sums[0] += loss.detach() * samples
        self._sums[1] += samples
        self._data_seconds += data_seconds
        for name in COUNTED:
            if name in notes:
                counts = self._counts.setdefault(name, torch.zeros(LARGEST + 1, dtype=torch.float64))
                counts[min(int(notes[name]), LARGEST)] += 1

    def pause(self) -> None:
        """What came since the last reading (an evaluation, a checkpoint) does not count."""
        self._totals = self._job.world.ledger.totals()
        self._links = self._job.world.ledger.links()
        self._since = time.perf_counter()

    def read(self, step: int) -> Reading:
        """What came since the last reading; collective. Raises `JobError` if the loss is not finite."""
        grown = self._job.world.ledger.since(self._totals)
        elapsed = time.perf_counter() - self._since
        joined = torch.cat([self._sums, *self._counts.values()])
        with phase("metrics"):
            self._job.world.allreduce(joined).wait()
        total, samples = joined[:2].tolist()
        noted = joined[2:].view(-1, LARGEST + 1)
        if not math.isfinite(total):
            raise JobError(f"the loss is {total} at step {step}: lower the learning rate or warm up longer")
        seconds = {name: total.waited for name, total in grown.items()} | {"data": self._data_seconds}
        seconds["compute"] = max(elapsed - sum(seconds.values()), 0.0)
        bytes_sent = {name: total.bytes for name, total in grown.items() if total.bytes}
        reading = Reading(
            loss=total / max(samples, 1),
            samples=int(samples),
            samples_per_s=samples / elapsed,
            phase_seconds=seconds,
            phase_bytes=bytes_sent,
            link_bytes=dict(self._job.world.ledger.links() - self._links),
            counts={name: _histogram(counts) for name, counts in zip(self._counts, noted, strict=True)},
        )
        self._sums.zero_()
        self._counts.clear()
        self._data_seconds = 0.0
        self.pause()
        return reading


def _histogram(counts: Tensor) -> dict[int, int]:
    return {value: int(count) for value, count in enumerate(counts.tolist()) if count}
