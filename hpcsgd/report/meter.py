"""What happened between two reports: loss, speed, and where time and bytes went."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd.core.topology import Job
from hpcsgd.transport import Transport, Work, phase

COUNTED = ("staleness", "ahead")
"""Notes of a method that come in small whole numbers."""
LARGEST = 63
"""Of them; more counts as so much."""
_OWN = "metrics"
"""The phase of the meter's own messages, left out of the bytes: they leave whenever all have read."""


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
    """Adds up steps until it is read.

    Sums over all ranks are taken on `aside`, a communicator with a lane of its own: groups that wait for
    nobody are not to wait here.
    """

    def __init__(self, job: Job, aside: Transport) -> None:
        self._job = job
        self._aside = aside
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

    def read(self) -> Work:
        """What came since the last reading: a `Reading`, to be had once all ranks have read theirs."""
        grown = self._job.world.ledger.since(self._totals)
        elapsed = time.perf_counter() - self._since
        seconds = {name: total.waited for name, total in grown.items()} | {"data": self._data_seconds}
        seconds["compute"] = max(elapsed - sum(seconds.values()), 0.0)
        sent = {name: total.bytes for name, total in grown.items() if total.bytes and name != _OWN}
        link_bytes: dict[int, float] = dict(self._job.world.ledger.links() - self._links)
        joined, counted = torch.cat([self._sums, *self._counts.values()]), list(self._counts)

        def over_all_ranks() -> Reading:
            self._aside.allreduce(joined).wait()
            total, samples = joined[:2].tolist()
            noted = joined[2:].view(-1, LARGEST + 1)
            return Reading(
                loss=total / max(samples, 1),
                samples=int(samples),
                samples_per_s=samples / elapsed,
                phase_seconds=seconds,
                phase_bytes=sent,
                link_bytes=link_bytes,
                counts={name: _histogram(counts) for name, counts in zip(counted, noted, strict=True)},
            )

        self._sums.zero_()
        self._counts.clear()
        self._data_seconds = 0.0
        self.pause()
        with phase(_OWN):
            return self._aside.run(over_all_ranks, "metrics")


def _histogram(counts: Tensor) -> dict[int, int]:
    return {value: int(count) for value, count in enumerate(counts.tolist()) if count}
