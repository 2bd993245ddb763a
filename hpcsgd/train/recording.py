"""The records of a training loop: metrics, progress, and the figures that are gathered from all ranks."""

from __future__ import annotations

import math
from abc import ABC
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hpcsgd.comm import Communicator, Work
from hpcsgd.config.schema import TrainingSection
from hpcsgd.errors import JobError, UserError
from hpcsgd.report.figures import speed_text
from hpcsgd.report.metrics import Metrics
from hpcsgd.report.progress import Progress
from hpcsgd.report.step_timer import StepRecord, StepTimer
from hpcsgd.train.monitor import DistanceMonitor
from hpcsgd.train.stopping import FAILED, Stopping
from hpcsgd.train.training_setup import TrainingSetup

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


class RecordingLoop(ABC):
    """The part of a `TrainLoop` that records what happens, and stops all ranks if rank 0 cannot.

    `metrics` and `monitor` are set on rank 0 only. `control` is a communicator with its own thread.
    """

    _progress: Progress

    def __init__(
        self, config: TrainingSection, parts: TrainingSetup, stopping: Stopping, control: Communicator
    ) -> None:
        self._config = config
        self._parts = parts
        self._stopping = stopping
        self._epoch = 0
        self._steps_per_epoch = parts.steps_per_epoch
        self._lr = 0.0  # learning rate of the last update
        self._epoch_sums = no_sums()
        self._grads_shared = 0  # steps since the last record that shared gradients without averaging models
        self._synced_at = 0  # the last step after which groups averaged their models
        counted = parts.optimizer.method.averager.traits.histogram_names
        self._meter = StepTimer(parts.optimizer.topology, control, counted, parts.sample, parts.by_torch)
        self._readings = Readings(self._meter)
        self.metrics: Metrics | None = None
        self.monitor: DistanceMonitor | None = None

    def _reason_to_stop(self, *, at_once: bool = False) -> str | None:
        """Return the reason to stop, as text, or None; all ranks call this after each step.

        With `at_once`, ranks wait for each other, and no reason that one has now is left for later. Raises
        `JobError` on all ranks if rank 0 cannot write metrics.
        """
        self._stopping.has_failed = self.metrics is not None and self.metrics.failure is not None
        reason = self._stopping.at_once() if at_once else self._stopping.now()
        if reason == FAILED:
            self._require_metrics()
        return reason

    def _require_metrics(self) -> None:
        with self._parts.optimizer.topology.raise_on_all_ranks("writing metrics"):
            if self.metrics is not None:
                self.metrics.require_written()

    def _note(self, metrics: Mapping[str, float]) -> None:
        """Record the `metrics` that the engine, a synchronization and the method report of a step."""
        self._grads_shared += "grads_shared" in metrics
        elsewhere = {"grads_shared", "distance", *self._meter.counted}
        if self.metrics is not None:
            rest = {name: value for name, value in metrics.items() if name not in elsewhere}
            self.metrics.method(self._parts.optimizer.t, rest)
        if "distance" in metrics:
            self._record_sync(metrics)

    def _record_sync(self, metrics: Mapping[str, float]) -> None:
        """Record the synchronization that `metrics` report, unless this step has another one already."""
        t, D = self._parts.optimizer.t, metrics["distance"]
        if t == self._synced_at:
            return
        self._synced_at = t
        if self.metrics is not None:
            self.metrics.sync(step=t, distance=D)
        if self.monitor is not None and (change := self.monitor.hear(D, self._lr)) is not None:
            self._progress.note(f"step {t}: {change}")

    def _read_meter(self) -> None:
        """Report the records of all steps so far, and wait for those that are being gathered; collective."""
        self._begin_reading()
        self._tell_readings(all_of_them=True)

    def _begin_reading(self) -> None:
        t, epoch = self._parts.optimizer.t, self._epoch + 1
        progress = epoch - len(self._parts.batches) / max(self._steps_per_epoch, 1)  # 0: no samples
        place = {"step": t, "epoch": epoch, "progress": progress}
        self._readings.begin(**place, lr=self._lr, grads_shared=self._grads_shared)
        self._grads_shared = 0

    def _tell_readings(self, *, all_of_them: bool = False) -> None:
        for taken, reading in self._readings.arrived(all_of_them=all_of_them):
            self._tell(taken, reading)

    def _tell(self, taken: Tree, reading: StepRecord) -> None:
        sums = [reading.loss * reading.samples, reading.samples, reading.samples / reading.samples_per_s]
        self._epoch_sums += torch.tensor(sums, device="cpu")
        if self.metrics is not None:
            self.metrics.step(**taken, **vars(reading))
        if taken["step"] % self._config.log_every == 0:
            place = {name: taken[name] for name in ("step", "epoch", "lr")}
            self._progress.step(**place, loss=reading.loss, speed=speed_text(vars(reading)))


def no_sums() -> Tensor:
    """Return zeros to which an epoch adds loss · samples, samples and seconds: float64 [3]."""
    return torch.zeros(3, dtype=torch.float64, device="cpu")
