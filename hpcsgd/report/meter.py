"""What happened between two reports: loss, speed, and where time and bytes went."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd.core.topology import Job
from hpcsgd.transport import Transport, Work, phase

LARGEST = 63
"""Of the numbers that are counted; more counts as so much."""
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
    nobody are not to wait here. `counted` are the notes, the same on all ranks, that come in small whole
    numbers.
    """

    def __init__(self, job: Job, aside: Transport, counted: Sequence[str] = ()) -> None:
        self._job = job
        self._aside = aside
        self._data_seconds = 0.0
        self._losses: Tensor | None = None  # times samples, where the model is
        self._samples = 0
        self.counted = counted
        self._counts = torch.zeros(len(counted), LARGEST + 1, dtype=torch.float64, device="cpu")
        self.pause()

    def step(self, loss: Tensor, samples: int, data_seconds: float, notes: Mapping[str, float]) -> None:
        """Count one step: its mean loss over `samples` of this rank, how long it waited for them, and what
        the method noted."""
        losses = (loss.detach() * samples).double()  # nobody waits for a device here
        self._losses = losses if self._losses is None else self._losses + losses
        self._samples += samples
        self._data_seconds += data_seconds
        for name, counts in zip(self.counted, self._counts, strict=True):
            if name in notes:
                counts[min(int(notes[name]), LARGEST)] += 1

    def pause(self) -> None:
        """What came since the last reading (an evaluation, a checkpoint) does not count."""
        self._totals = self._job.world.ledger.totals()
        self._links = self._job.world.ledger.links()
        self._since = time.perf_counter()

    def read(self) -> Work:
        """What came since the last reading: a `Reading`, to be had once all ranks have read theirs. Waits for
        the model's device."""
        grown = self._job.world.ledger.since(self._totals)
        elapsed = time.perf_counter() - self._since
        seconds = {name: total.waited for name, total in grown.items()} | {"data": self._data_seconds}
        seconds["compute"] = max(elapsed - sum(seconds.values()), 0.0)
        sent = {name: total.bytes for name, total in grown.items() if total.bytes and name != _OWN}
        link_bytes: dict[int, float] = dict(self._job.world.ledger.links() - self._links)
        losses = 0.0 if self._losses is None else self._losses.item()
        sums = torch.tensor([losses, self._samples], dtype=torch.float64, device="cpu")
        joined = torch.cat([sums, self._counts.flatten()])

        def over_all_ranks() -> Reading:
            self._aside.allreduce(joined).wait()
            total, samples = joined[:2].tolist()
            found = map(_histogram, joined[2:].view(-1, LARGEST + 1))
            return Reading(
                loss=total / max(samples, 1),
                samples=int(samples),
                samples_per_s=samples / elapsed,
                phase_seconds=seconds,
                phase_bytes=sent,
                link_bytes=link_bytes,
                counts={name: counts for name, counts in zip(self.counted, found, strict=True) if counts},
            )

        self._losses = None
        self._samples = 0
        self._counts.zero_()
        self._data_seconds = 0.0
        self.pause()
        with phase(_OWN):
            return self._aside.run(over_all_ranks, "metrics")


def _histogram(counts: Tensor) -> dict[int, int]:
    return {value: int(count) for value, count in enumerate(counts.tolist()) if count}
