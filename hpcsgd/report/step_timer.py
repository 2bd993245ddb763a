"""Measure the steps from one record to the next: loss, speed, and the time and bytes of each phase."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpcsgd.comm import Communicator, Work, phase
from hpcsgd.core.topology import Topology

LARGEST = 63
"""Largest value of a counted metric. Larger values count as this value."""
_OWN = "metrics"
"""The phase of the timer's own messages. Their bytes are not counted: other ranks affect when they are sent.
"""


@dataclass(frozen=True)
class Sample:
    """The tokens and FLOPs of one sample, and the peak speed of a rank. Unknown values are None."""

    tokens: int | None = None
    """Tokens per sample."""
    flops: float | None = None
    """FLOPs of a forward and a backward pass of one sample."""
    peak: float | None = None
    """Peak speed of a rank in TFLOP/s."""


@dataclass(frozen=True)
class StepRecord:
    """The measurements of the steps since the previous record.

    Of all ranks: `loss` is the mean per sample. `tokens` and `flops` follow from a `Sample`. `utilization` is
    `flops` per second as a fraction of the ranks' peak. `counts` says, for each name, how often each number
    occurred. `gradient_norm` is the root of the mean over the groups of ‖g‖² in the last step.

    Of this rank: seconds and bytes of each phase, and bytes to each rank of its inter-group communicator, of
    hpcsgd's own messages. `bytes_by_torch` is computed: the bytes that torch sends for an FSDP model.
    """

    loss: float
    samples: int
    samples_per_s: float
    phase_seconds: dict[str, float]
    phase_bytes: dict[str, float]
    link_bytes: dict[int, float]
    counts: dict[str, dict[int, int]]
    gradient_norm: float | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    flops: float | None = None
    utilization: float | None = None
    bytes_by_torch: float | None = None


class StepTimer:
    """A timer that adds up the measurements of steps until a record is read.

    Sums over all ranks are taken on `control`, a communicator with its own thread, so that independent
    groups do not wait for each other here. `counted` has the names of the method's metrics that are small
    whole numbers; it is the same on all ranks.
    """

    def __init__(
        self,
        topology: Topology,
        control: Communicator,
        counted: Sequence[str] = (),
        sample: Sample | None = None,
        by_torch: float | None = None,
    ) -> None:
        """Start. `by_torch` is the bytes that torch sends from this rank per forward and backward pass."""
        self._job = topology
        self._control = control
        self._data_seconds = 0.0
        self._losses: Tensor | None = None  # loss · samples, on the device of the model
        self._samples = 0
        self._square: Tensor | None = None
        self._sample = sample or Sample()
        self._by_torch = by_torch
        self._passes = 0
        self.counted = counted
        self._counts = torch.zeros(len(counted), LARGEST + 1, dtype=torch.float64, device="cpu")
        self.pause()

    def step(self, loss: Tensor, samples: int, data_seconds: float, metrics: Mapping[str, float]) -> None:
        """Add a step: this rank's mean loss over `samples`, its seconds of waiting for data, and metrics."""
        losses = (loss.detach() * samples).double()  # without waiting for a device
        self._losses = losses if self._losses is None else self._losses + losses
        self._samples += samples
        self._data_seconds += data_seconds
        for name, counts in zip(self.counted, self._counts, strict=True):
            if name in metrics:
                counts[min(int(metrics[name]), LARGEST)] += 1

    def passes(self, count: int) -> None:
        """Add `count` backward passes, those of the step that is counted next."""
        self._passes += count

    def gradient(self, square: Tensor | None) -> None:
        """Set this rank's part of ‖g‖², the squared norm of the gradient in the last counted step."""
        self._square = square

    def pause(self) -> None:
        """Ignore time and bytes since the last record, such as those of an evaluation or a checkpoint."""
        self._totals = self._job.world.stats.totals()
        self._links = self._job.world.stats.links()
        self._since = time.perf_counter()

    def read(self) -> Work:
        """Return the work that results in the `StepRecord` of the steps since the last call.

        The work is done after all ranks have called `read`. The call itself waits for the model's device.
        """
        grown = self._job.world.stats.since(self._totals)
        elapsed = time.perf_counter() - self._since
        seconds = {name: total.waited for name, total in grown.items()} | {"data": self._data_seconds}
        seconds["compute"] = max(elapsed - sum(seconds.values()), 0.0)
        sent = {name: total.bytes for name, total in grown.items() if total.bytes and name != _OWN}
        link_bytes: dict[int, float] = dict(self._job.world.stats.links() - self._links)
        losses = 0.0 if self._losses is None else self._losses.item()
        square = 0.0 if self._square is None else self._square.item()
        known = self._square is not None  # either on all ranks or on none
        sums = torch.tensor([losses, self._samples, square], dtype=torch.float64, device="cpu")
        joined = torch.cat([sums, self._counts.flatten()])
        by_torch = None if self._by_torch is None else self._passes * self._by_torch

        def over_all_ranks() -> StepRecord:
            self._control.allreduce(joined).wait()
            total, samples, squares = joined[:3].tolist()
            found = map(_histogram, joined[3:].view(-1, LARGEST + 1))
            return StepRecord(
                loss=total / max(samples, 1),
                samples=int(samples),
                samples_per_s=samples / elapsed,
                phase_seconds=seconds,
                phase_bytes=sent,
                link_bytes=link_bytes,
                counts={name: counts for name, counts in zip(self.counted, found, strict=True) if counts},
                gradient_norm=(squares / self._job.num_groups) ** 0.5 if known else None,
                bytes_by_torch=by_torch,
                **self._amounts(int(samples), elapsed),
            )

        self._losses = None
        self._samples = 0
        self._passes = 0
        self._square = None
        self._counts.zero_()
        self._data_seconds = 0.0
        self.pause()
        with phase(_OWN):
            return self._control.run(over_all_ranks, "metrics")

    def _amounts(self, samples: int, seconds: float) -> dict[str, Any]:
        """Return the record's fields for tokens and FLOPs: amounts, and rates over `seconds`."""
        sample, found = self._sample, dict[str, Any]()
        if sample.tokens is not None:
            found |= {"tokens": samples * sample.tokens, "tokens_per_s": samples * sample.tokens / seconds}
        if sample.flops is not None:
            found["flops"] = samples * sample.flops
            if sample.peak is not None:
                found["utilization"] = found["flops"] / seconds / (sample.peak * 1e12 * self._job.world.size)
        return found


def _histogram(counts: Tensor) -> dict[int, int]:
    return {value: int(count) for value, count in enumerate(counts.tolist()) if count}
