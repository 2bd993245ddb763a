"""The training loop: epochs of steps, with metrics, evaluations and checkpoints between them."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hpcsgd.checkpoint import Writer, capture
from hpcsgd.comm import Communicator
from hpcsgd.config.schema import Config
from hpcsgd.core.generators import generators_state, load_generators_state
from hpcsgd.errors import JobError
from hpcsgd.report.figures import speed_text, written
from hpcsgd.report.metrics import Metrics
from hpcsgd.report.progress import Progress
from hpcsgd.report.step_timer import StepRecord, StepTimer
from hpcsgd.train.divergence import diverged
from hpcsgd.train.evaluation import evaluate
from hpcsgd.train.monitor import DistanceMonitor
from hpcsgd.train.passes import backward
from hpcsgd.train.readings import Readings
from hpcsgd.train.scheduler import resume_schedule, scheduler_state
from hpcsgd.train.stopping import Stopping
from hpcsgd.train.tracing import Tracer, Untraced
from hpcsgd.train.training_setup import TrainingSetup

Tree = dict[str, Any]


class TrainLoop(ABC):
    """The training loop of a rank, from the state of its `TrainingSetup` to the last epoch.

    `metrics` and `monitor` are set on rank 0 only. The monitor compares the groups' distances with those of a
    probe. `control` is a communicator with its own thread.
    """

    def __init__(
        self,
        config: Config,
        parts: TrainingSetup,
        checkpoints: Writer,
        stopping: Stopping,
        control: Communicator,
    ) -> None:
        self._config = config.training
        self._schedule = config.lr_schedule
        self._per_step = self._schedule.interval == "step"
        self._parts = parts
        self._expected = parts.length.expected  # steps of the whole run, as far as they are known
        self._checkpoints = checkpoints
        self._stopping = stopping
        self._epoch = 0
        self._steps_per_epoch = parts.steps_per_epoch
        self._lr = 0.0  # learning rate of the last update
        self._epoch_sums = _no_sums()
        self._cut = False  # the run has ended within an epoch, and has reported this epoch's results so far
        self._saved_at = (-1, -1, False)  # step, epoch and `_cut` of the last checkpoint
        self._scaled_for = parts.optimizer.topology.total_groups  # groups that learning rates are scaled for
        self._grads_shared = 0  # steps since the last record that shared gradients without averaging models
        self._synced_at = 0  # the last step after which groups averaged their models
        self._pass_size: int | None = None  # samples of a pass, if a batch is split into passes
        counted = parts.optimizer.method.averager.traits.histogram_names
        self._meter = StepTimer(parts.optimizer.topology, control, counted, parts.sample, parts.by_torch)
        self._readings = Readings(self._meter)
        self.tracer: Tracer = Untraced()
        self.metrics: Metrics | None = None
        self.monitor: DistanceMonitor | None = None

    def resume_from(self, shared: Tree, own: Tree | None) -> None:
        """Continue from a checkpoint: `shared` state, and this rank's `own`, None if P × K has changed."""
        parts = self._parts
        self._epoch = shared["epoch"]
        self._epoch_sums = shared["epoch_sums"]
        self._cut = shared.get("cut", False)
        self._saved_at = parts.optimizer.t, self._epoch, self._cut
        self._scaled_for = shared.get("scaled_for", self._scaled_for)
        parts.sampler.load_state_dict(shared["sampler"])
        parts.warm_up.load_state_dict(shared["warm_up"])
        self._expected = resume_schedule(parts, self._schedule, self._epoch, shared, own)
        parts.precision.load_state_dict(shared["precision"])
        if own is not None:
            load_generators_state(own, parts.device)
            parts.generator.set_state(own["transform"])
        if parts.natural_gradient is not None:
            parts.natural_gradient.resume_from((own or {}).get("natural_gradient"))

    def train(self) -> str | None:
        """Train to the end. Return why the training stopped early, or None. Collective."""
        length, done = self._parts.length, self._parts.optimizer.t
        self._meter.pause()
        with Progress(self._expected, length.epochs, first_step=done) as self._progress:
            try:
                reason = self._train_epochs()
            except JobError:  # all ranks raise it, so that a checkpoint that is being written can be finished
                self._checkpoints.finish()
                raise
            if reason is not None:
                self._save()
            self._checkpoints.finish()
            if reason is not None:
                self._progress.note(f"{reason}: {self._at_exit()}")
        return reason

    @abstractmethod
    def _train_epochs(self) -> str | None:
        """Train from the current step to the last epoch. Return why training stopped early, or None."""

    @abstractmethod
    def _at_exit(self) -> str:
        """Describe in words what happens to the training after a stop."""

    @abstractmethod
    def _stands_for_all(self) -> bool:
        """Return whether these ranks have the model of all groups now, and evaluate and save for all."""

    def _step(self, x: Tensor, y: Tensor, data_seconds: float) -> None:
        parts = self._parts
        optimizer = parts.optimizer
        self.tracer.waited(data_seconds)
        if (optimizer.t + 1) % self._config.log_every == 0:
            optimizer.updating.norm.want()
        loss, passes = backward(parts, self.tracer, *parts.vary(x, y), size=self._pass_size or len(y))
        self._meter.passes(passes)
        self._lr = optimizer.rates[0]
        with self.tracer.span("update"):
            made = parts.precision.step(optimizer, loss=loss)
        parts.batches.advance()
        self._meter.step(loss, len(y), data_seconds, optimizer.metrics if made else {})
        if made:
            self._updated()
        else:
            self._progress.note(
                f"step {optimizer.t + 1}: no update: gradients overflowed in float16 (loss scale too high)"
            )

    def _updated(self) -> None:
        """Do what follows an update: learning rate, metrics, trace, checkpoint."""
        parts = self._parts
        optimizer = parts.optimizer
        if parts.scheduler is not None and self._per_step:
            parts.scheduler.step()
        self._note(optimizer.metrics)
        self.tracer.stepped(optimizer.t, optimizer.metrics)
        if optimizer.t % self._config.log_every == 0:
            self._meter.gradient(optimizer.updating.norm.take())
            self._begin_reading()
        self._tell_readings()
        if self._checkpoint_due() and self._left():  # at an epoch's end `_close_epoch` saves
            self._save()

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

    def _batches(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield the remaining batches of this epoch, each with the seconds spent waiting for the loader."""
        parts = self._parts
        asked = time.perf_counter()
        for batch in parts.loader:
            seconds = time.perf_counter() - asked
            x, y = batch if parts.injected is None else parts.injected.complete(batch)
            yield x, y, seconds
            asked = time.perf_counter()

    def _close_epoch(self, *, cut: bool = False) -> None:
        """End the epoch. With `cut` the run ends within the epoch; a longer run can continue there."""
        parts, number = self._parts, self._epoch + 1
        self._read_meter()
        total, samples, seconds = self._epoch_sums.tolist()
        if self.metrics is not None:
            self.metrics.epoch(
                step=parts.optimizer.t, epoch=number, loss=total / max(samples, 1), seconds=seconds
            )
        self._cut = cut
        if not cut:
            self._begin_epoch(number)
        last = self._over()
        if number % self._config.eval_every_epochs == 0 or last:
            self._evaluate(number)
        if self._config.checkpoint_every_steps is None or self._checkpoint_due() or last:
            self._save()

    def _begin_epoch(self, number: int) -> None:
        parts = self._parts
        self._epoch = number
        if parts.scheduler is not None and not self._per_step:
            parts.scheduler.step()
        self._epoch_sums = _no_sums()
        parts.sampler.set_epoch(number)

    def _over(self) -> bool:
        place = self._epoch, self._parts.optimizer.t, self._parts.batches
        return self._parts.length.over(*place, cut=self._cut)

    def _left(self) -> int:
        """Return the number of batches still to come in this epoch."""
        parts = self._parts
        return parts.length.left(self._epoch, parts.optimizer.t, parts.batches)

    def _checkpoint_due(self, after: int = 0) -> bool:
        every = self._config.checkpoint_every_steps
        return every is not None and (self._parts.optimizer.t + after) % every == 0

    def _evaluate(self, epoch: int) -> None:
        if not self._stands_for_all():
            return
        with self.tracer.span("eval"):
            score = evaluate(self._parts)
        if not math.isfinite(score.loss):  # the same on all ranks
            raise JobError(diverged("test loss", score.loss, self._parts.optimizer.t))
        if self.metrics is not None:
            self.metrics.evaluation(
                step=self._parts.optimizer.t, epoch=epoch, loss=score.loss, distance=score.distance,
                seconds=score.seconds, **score.figures,
            )  # fmt: skip
        self._progress.note(
            f"epoch {epoch}/{self._parts.length.epochs}  test {written(score.figures)}  "
            f"loss {score.loss:.4f}  in {score.seconds:.1f} s"
        )
        self._meter.pause()

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

    def _save(self) -> None:
        """Begin to write a checkpoint of this step, unless it is already saved."""
        parts = self._parts
        now = parts.optimizer.t, self._epoch, self._cut
        if self._saved_at == now or not self._stands_for_all():
            return
        self._read_meter()
        shared = {
            "epoch": self._epoch,
            "cut": self._cut,
            "epoch_sums": self._epoch_sums,
            "scaled_for": self._scaled_for,
            "sampler": parts.sampler.state_dict(),
            "warm_up": parts.warm_up.state_dict(),
            "scheduler": scheduler_state(parts.scheduler),
            "length": {"asked": parts.length.expected, "expected": self._expected},
            "precision": parts.precision.state_dict(),
        }
        own = {**generators_state(parts.device), "transform": parts.generator.get_state()}
        if parts.natural_gradient is not None:
            own["natural_gradient"] = parts.natural_gradient.estimates()
        with self.tracer.span("checkpoint"):
            self._checkpoints.begin(parts.optimizer.t, capture(parts.optimizer, shared=shared, own=own))
        self._saved_at = now
        self._meter.pause()


def _no_sums() -> Tensor:
    """Return zeros to which an epoch adds loss · samples, samples and seconds: float64 [3]."""
    return torch.zeros(3, dtype=torch.float64, device="cpu")
