"""The training loop: epochs of steps, with metrics, evaluations and checkpoints between them."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hpcsgd.checkpoint import Writer, capture
from hpcsgd.comm import Communicator
from hpcsgd.config.schema import Config
from hpcsgd.data import read_batches
from hpcsgd.errors import JobError
from hpcsgd.report.figures import written
from hpcsgd.report.progress import Progress
from hpcsgd.train.evaluation import evaluate
from hpcsgd.train.passes import backward
from hpcsgd.train.recording import RecordingLoop, diverged, no_sums
from hpcsgd.train.scheduler import resume_schedule
from hpcsgd.train.setup_state import own_state, resume_own, resume_shared, shared_state
from hpcsgd.train.stopping import Stopping
from hpcsgd.train.tracing import Tracer, Untraced
from hpcsgd.train.training_setup import TrainingSetup

Tree = dict[str, Any]


class TrainLoop(RecordingLoop, ABC):
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
        super().__init__(config.training, parts, stopping, control)
        self._schedule = config.lr_schedule
        self._per_step = self._schedule.interval == "step"
        self._expected = parts.length.expected  # steps of the whole run, as far as they are known
        self._checkpoints = checkpoints
        self._cut = False  # the run has ended within an epoch, and has reported this epoch's results so far
        self._saved_at = (-1, -1, False)  # step, epoch and `_cut` of the last checkpoint
        self._to_evaluate: int | None = None  # the number of the epoch that has ended, if that is still due
        self._scaled_for = parts.optimizer.topology.total_groups  # groups that learning rates are scaled for
        self._pass_size: int | None = None  # samples of a pass, if a batch is split into passes
        self.tracer: Tracer = Untraced()

    def resume_from(self, shared: Tree, own: Tree | None) -> None:
        """Continue from a checkpoint: `shared` state, and this rank's `own`, None if P × K has changed."""
        parts = self._parts
        self._epoch = shared["epoch"]
        self._epoch_sums = shared["epoch_sums"]
        self._cut = shared.get("cut", False)
        self._saved_at = parts.optimizer.t, self._epoch, self._cut
        self._to_evaluate = shared.get("to_evaluate")
        self._scaled_for = shared.get("scaled_for", self._scaled_for)
        resume_shared(parts, shared)
        self._expected = resume_schedule(parts, self._schedule, self._epoch, shared, own)
        resume_own(parts, own)

    def train(self) -> str | None:
        """Train to the end. Return why the training stopped early, or None. Collective."""
        length, done = self._parts.length, self._parts.optimizer.t
        self._meter.pause()
        with Progress(self._expected, length.epochs, first_step=done) as self._progress:
            try:
                reason = self._train_epochs()
                self._require_metrics()
                if reason is not None:
                    self._save()
            except JobError:  # all ranks raise it, so that a checkpoint that is being written can be finished
                self._checkpoints.finish()
                raise
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
        if self._checkpoint_due() and self._left():  # at an epoch's end `_save_epoch` saves
            self._save()

    def _batches(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield the remaining batches of this epoch, each with the seconds spent waiting for the loader."""
        parts = self._parts
        asked = time.perf_counter()
        for batch in read_batches(parts.loader):
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
        if number % self._config.eval_every_epochs == 0 or self._over():
            self._to_evaluate = number

    def _save_epoch(self) -> None:
        """Save the epoch that has ended, if that is due."""
        if self._config.checkpoint_every_steps is None or self._checkpoint_due() or self._over():
            self._save()

    def _begin_epoch(self, number: int) -> None:
        parts = self._parts
        self._epoch = number
        if parts.scheduler is not None and not self._per_step:
            parts.scheduler.step()
        self._epoch_sums = no_sums()
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

    def _forget_recorded(self) -> None:
        """Do not evaluate the epoch that ends at the loaded checkpoint if its result is recorded already."""
        if self._to_evaluate is not None:
            recorded = self.metrics is not None and self.metrics.evaluated_at == self._parts.optimizer.t
            if any(self._parts.optimizer.topology.world.gather_objects(recorded)):
                self._to_evaluate = None

    def _evaluate(self) -> None:
        """Evaluate the epoch that has ended, if that is due."""
        epoch, self._to_evaluate = self._to_evaluate, None
        if epoch is None or not self._stands_for_all():
            return
        with self.tracer.span("eval"):
            score = evaluate(self._parts)
        t = self._parts.optimizer.t
        if not math.isfinite(score.loss):  # the same on all ranks
            if self._saved_at[0] == t:
                self._checkpoints.remove(t)  # a run that goes on would do so with this model
            raise JobError(diverged("test loss", score.loss, t))
        if self.metrics is not None:
            self.metrics.evaluation(
                step=t, epoch=epoch, loss=score.loss, distance=score.distance,
                seconds=score.seconds, **score.figures,
            )  # fmt: skip
        self._progress.note(
            f"epoch {epoch}/{self._parts.length.epochs}  test {written(score.figures)}  "
            f"loss {score.loss:.4f}  in {score.seconds:.1f} s"
        )
        self._meter.pause()

    def _save(self) -> None:
        """Begin to write a checkpoint of this step, unless it is already saved."""
        parts = self._parts
        now = parts.optimizer.t, self._epoch, self._cut
        if self._saved_at == now or not self._stands_for_all():
            return
        self._read_meter()
        self._require_metrics()  # a run that goes on here makes no records of earlier steps
        shared = {
            "epoch": self._epoch,
            "cut": self._cut,
            "epoch_sums": self._epoch_sums,
            "to_evaluate": self._to_evaluate,
            "scaled_for": self._scaled_for,
            "length": {"asked": parts.length.expected, "expected": self._expected},
            **shared_state(parts),
        }
        own = own_state(parts)
        with self.tracer.span("checkpoint"):
            self._checkpoints.begin(parts.optimizer.t, capture(parts.optimizer, shared=shared, own=own))
        self._saved_at = now
        self._meter.pause()
