"""The training loop of an elastic replica group, which may die and return (EnsembleSync, section 3).

Every replica group makes the same number of steps per epoch, on its own part of the samples. A round of the
elastic average ends the epoch and assigns the samples of the next one to the groups that are alive. After
each round the coordinator's register states the step and the epoch of the training. A group at another step
continues at that step, because it has just been started or was left behind. A group that returns needs
nothing else. A group without samples only takes part in the rounds, until samples are assigned again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hpcsgd.checkpoint import Writer
from hpcsgd.comm import Communicator, PeerLost
from hpcsgd.config.schema import Config, LrScheduleSection
from hpcsgd.core.topology import Topology
from hpcsgd.data import Batches
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.endings import Relocated
from hpcsgd.elastic.register import Point
from hpcsgd.engine.lr import LivingGroupsScaling
from hpcsgd.report import run_folder
from hpcsgd.train.loop import TrainLoop
from hpcsgd.train.scheduler import fast_forward
from hpcsgd.train.static_run import record_start
from hpcsgd.train.stopping import Stopping, saved_at
from hpcsgd.train.training_setup import TrainingSetup


class ElasticLoop(TrainLoop):
    """The training loop of a replica group.

    After a round, one group evaluates and saves for all: the one with the lowest index among those that
    counted in the round and had missed none before. `train` raises `Over` if another group has finished the
    training and saved the result, and `Relocated` if this group has to be started again with another number
    of ranks.
    """

    def __init__(
        self,
        *arguments: Any,
        elastic_average: ElasticAverage,
        reallocated: str = "none",
        living: LivingGroupsScaling | None = None,
    ) -> None:
        """Set up the loop.

        `reallocated` is the resource that the coordinator moves between groups. `living` makes the learning
        rate follow the number of living groups, or is None.
        """
        super().__init__(*arguments)
        self.elastic_average = elastic_average
        self._assigned = (-1, 0)
        self._sharing: tuple[int, ...] = ()
        """The groups among which the samples were divided when this group took its share."""
        self._reason: str | None = None
        self._computed, self._steps = 0.0, 0
        """Since samples were assigned: seconds of computing, without waits for other groups, and steps."""
        self._resource = reallocated
        self._living = living

    def _train_epochs(self) -> str | None:
        elastic_average, sampler = self.elastic_average, self._parts.sampler
        self._report(deal=(self._epoch, sampler.position))
        self._synced_at = self._parts.optimizer.t  # do not record the average at the start, before any step
        self._forget_recorded()
        self._synchronize()
        self._evaluate()
        while self._epoch < self._parts.length.epochs:
            if elastic_average.leaving:
                return self._reason or self._stopping.at_once() or "another replica group has to stop"
            if elastic_average.index in elastic_average.after.sharing:
                self._train_on()
            else:
                self._look_on()
        while not self._is_first():
            elastic_average.wait()  # a round would not wait for the first group, which evaluates and saves
            self._report(deal=(self._epoch, 0), saving=True)
            self._synchronize()
        if self._saved_at != (self._parts.optimizer.t, self._epoch, self._cut):  # the first group was lost
            self._to_evaluate = self._epoch
            self._save()
            self._evaluate()
        return None

    def _train_on(self) -> None:
        """Train to the end of the epoch, or until a round shows that other groups are at another step."""
        elastic_average, batches = self.elastic_average, self._parts.batches
        for x, y, seconds in self._batches():
            left, before = len(batches) - 1, elastic_average.rounds
            self._reason = self._reason_to_stop() or self._reason
            self._report(
                saving=not left or self._checkpoint_due(after=1),
                deal=self._assigned if left else (self._epoch + 1, 0),
                progress=self._epoch + 1 - left / self._steps_per_epoch,
                step_seconds=self._computed / self._steps if self._steps else 0.0,
                leaving=self._reason is not None,
            )
            started, waited = time.perf_counter(), elastic_average.seconds
            self._step(x, y, seconds)
            self._computed += time.perf_counter() - started - (elastic_average.seconds - waited)
            self._steps += 1
            if elastic_average.rounds > before and not self._settle():
                return
        self._report(deal=(self._epoch + 1, 0), step_seconds=self._computed / max(self._steps, 1))
        self._synchronize()

    def _look_on(self) -> None:
        """Take part in a round without training, because this group has no samples.

        If all groups that had samples have left, the samples that they have not used are assigned again.
        """
        self._reason = self._reason_to_stop() or self._reason
        self._report(deal=(self._epoch, self._parts.sampler.position), leaving=self._reason is not None)
        self._synchronize()

    def _report(self, **changed: Any) -> None:
        self.elastic_average.report = replace(self.elastic_average.report, **changed)

    def _synchronize(self) -> None:
        optimizer = self._parts.optimizer
        optimizer.average_models()
        if self.elastic_average.after.place.t == optimizer.t:  # else there are no metrics of this round
            self._note(optimizer.metrics)
        self._settle()

    def _settle(self) -> bool:
        """Bring this group to the step and the assignment of samples that the register states.

        Return True if the group was there already and goes on with its assigned samples.
        """
        place, t = self.elastic_average.after.place, self._parts.optimizer.t
        sharing = self.elastic_average.after.sharing
        if (place.t, place.as_assigned, sharing) == (t, self._assigned, self._sharing):
            return not self.elastic_average.leaving
        if (place.t, place.as_assigned) == (t, (self._epoch + 1, 0)) and self._assigned != (-1, 0):
            self._close_epoch()
            self._save_epoch()
            self._evaluate()
        else:
            self._go_to(place)
        self._take_share()
        begins = place == self.elastic_average.after.assigned_at and place.as_assigned == (self._epoch, 0)
        if begins and self._epoch < self._parts.length.epochs and self._moving():
            self._move()
        return False

    def _go_to(self, place: Point) -> None:
        """Continue at the step and epoch of `place`.

        Raises `PeerLost` if `place` is before this group's step. Then the other groups have restarted from
        an earlier step, and this group has to restart as well.
        """
        parts = self._parts
        steps, epochs = place.t - parts.optimizer.t, place.epoch - self._epoch
        if min(steps, epochs) < 0:
            raise PeerLost(
                f"the other replica groups have gone back to step {place.t} from {parts.optimizer.t}"
            )
        if parts.scheduler is not None:
            fast_forward(parts.scheduler, steps if self._per_step else epochs)
        if steps:
            self._to_evaluate = None  # the others have done it
            self._progress.note(f"going on at step {place.t}, where the others are")
        parts.optimizer.resume_from(place.t, [{} for _ in parts.optimizer.param_groups], None)
        parts.warm_up.load_state_dict({"t": place.t})
        self._epoch = place.epoch

    def _take_share(self) -> None:
        """Start this group's part of the assigned samples, behind those that were used for earlier steps."""
        elastic_average, sampler = self.elastic_average, self._parts.sampler
        after = elastic_average.after
        place, dealt, sharing = after.place, after.assigned_at, after.sharing
        here = sharing.index(elastic_average.index) if elastic_average.index in sharing else 0
        self._assigned, self._sharing = dealt.as_assigned, sharing
        if self._living is not None:
            self._living.follow(len(sharing), self._scaled_for)
        sampler.assigned(here, len(sharing))
        sampler.set_epoch(place.epoch, start=0)
        batches = self._parts.batches
        assert isinstance(batches, Batches)
        batches.start_after(dealt.seen, place.t - dealt.t)
        self._steps_per_epoch = place.t - dealt.t + len(batches)
        units = dict(after.units)
        if elastic_average.index in units:
            self._use(units[elastic_average.index])
        self._computed, self._steps = 0.0, 0
        self._report(step_seconds=0.0)  # the earlier value was with other resources
        epochs_left = self._parts.length.epochs - place.epoch
        self._progress.expect(dealt.t + epochs_left * self._steps_per_epoch)
        self._meter.pause()

    def _use(self, units: int) -> None:
        """Set torch's threads, or the samples per pass, by the assigned `units`; `_move` changes ranks."""
        match self._resource:
            case "threads":
                torch.set_num_threads(units)
            case "samples":
                self._pass_size = max(1, units // self._parts.optimizer.topology.group_size)

    def _moving(self) -> set[int]:
        """Return the indices of the groups that were assigned another number of ranks than they have."""
        if self._resource != "ranks":
            return set()
        after = self.elastic_average.after
        units = dict(after.units)
        return {m.replica_group for m in after.members if units.get(m.replica_group, m.ranks) != m.ranks}

    def _move(self) -> None:
        """Save. Groups with a new number of ranks leave to be restarted; the others wait for their return."""
        moving = self._moving()
        self._report(deal=self._assigned)  # a group without samples has reported another position
        self._save()
        self._checkpoints.finish()
        self._parts.optimizer.average_models()
        if self.elastic_average.index in moving:
            self.elastic_average.move()
            raise Relocated
        self._synchronize()

    def _stands_for_all(self) -> bool:
        """Return whether this group is the first one, and has the averaged model, as after a round."""
        place = self.elastic_average.after.place
        is_common = place.t == self._parts.optimizer.t and self.elastic_average.covers_all
        return is_common and self._is_first()

    def _at_exit(self) -> str:
        t, after = self._parts.optimizer.t, self.elastic_average.after
        if set(after.replica_groups) - set(after.going) and not after.leaving:
            return f"left at step {t}, the other replica groups go on"
        return saved_at(t)

    def _is_first(self) -> bool:
        """Return whether this group has the lowest index of the groups that may evaluate and save for all.

        These are the groups that have missed no round and need not stop; if there are none, all members that
        need not stop. Groups that must stop do it only if all groups must, because writing files takes time.
        """
        here, after = set(self.elastic_average.up_to_date), self.elastic_average.after
        going = set(after.going)
        return self.elastic_average.index == min(here - going or set(after.replica_groups) - going or here)


@dataclass(frozen=True)
class ElasticRun:
    """What an elastic run does differently from a static run; the counterpart is `static_run.StaticRun`."""

    config: Config
    topology: Topology
    elastic_average: ElasticAverage

    @property
    def folder(self) -> Path:
        return run_folder.replica_group_folder(self.config.run.output_dir, self.elastic_average.index)

    def open_folder(self, resume: bool, open_files: ExitStack, devices: Mapping[str, int]) -> None:
        """Open the folder of this group. `hpcsgd launch` has already written the configuration."""
        open_files.callback(self.elastic_average.close)
        with self.topology.raise_on_all_ranks("opening the folder of the replica group"):
            if self.topology.rank == 0:
                open_files.enter_context(run_folder.owned(self.folder, resume=True))
                with run_folder.usable(self.folder):
                    open_files.enter_context(run_folder.log_into(self.folder))
                    record_start(self.folder, self.topology, devices)

    def goes_on(self, resume: bool) -> bool:
        return True

    def own(self, state: dict[str, Any] | None) -> None:
        return None  # another group may have saved it: its random state does not fit this group

    def loop(
        self, parts: TrainingSetup, checkpoints: Writer, stopping: Stopping, control: Communicator
    ) -> ElasticLoop:
        return ElasticLoop(
            self.config, parts, checkpoints, stopping, control,
            elastic_average=self.elastic_average, reallocated=self.config.rebalance.resource,
            living=living_of(self.config.lr_schedule, parts),
        )  # fmt: skip

    def conclude(self, complete: bool) -> None:
        """Finish the elastic average. `hpcsgd launch` reports on all groups."""
        if complete:
            self.elastic_average.finish()


def living_of(schedule: LrScheduleSection, parts: TrainingSetup) -> LivingGroupsScaling | None:
    """Return the object that scales the learning rate with the number of living groups, or None."""
    if schedule.scale_with == "started":
        return None
    return LivingGroupsScaling(parts.warm_up, schedule.scaling)
