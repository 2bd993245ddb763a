"""The training loop of one island among several that may die and return (EnsembleSync, section 3).

Every island makes as many steps an epoch, each on its own share of the samples; a meeting ends the epoch and
deals the samples of the next one to those that are alive. After each meeting the register says where the
training is. Who is somewhere else, because it has just been started or was left behind, goes there: that is
all there is to coming back. Until samples are dealt again, whoever has none looks on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hpcsgd.checkpoint import Writer
from hpcsgd.comm import Communicator, PeerLost
from hpcsgd.config.schema import Config, LrScheduleSection
from hpcsgd.core.topology import Topology
from hpcsgd.data import Batches
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.register import Point
from hpcsgd.engine.lr import Living
from hpcsgd.errors import without_warnings
from hpcsgd.report import run_folder
from hpcsgd.train.loop import TrainLoop
from hpcsgd.train.static_run import record_start
from hpcsgd.train.stopping import Stopping, saved_at
from hpcsgd.train.training_setup import TrainingSetup


class Relocated(Exception):
    """This island has to be started again, with other ranks."""


class ElasticLoop(TrainLoop):
    """Of the islands that counted in a meeting the first one evaluates and saves for all.

    `train` raises `Over` where another island has come to the end, and saved it, and `Moved`.
    """

    def __init__(
        self,
        *arguments: Any,
        elastic_average: ElasticAverage,
        reallocated: str = "none",
        living: Living | None = None,
    ) -> None:
        """`reallocated`: the unit of compute that the coordinator moves between islands. `living`: what the
        learning rate follows them by, if it does."""
        super().__init__(*arguments)
        self.elastic_average = elastic_average
        self._assigned = (-1, 0)
        self._reason: str | None = None
        self._steps_per_epoch = 0
        self._computed, self._steps = 0.0, 0
        """Seconds, without waiting for other islands, and steps since samples were dealt."""
        self._resource = reallocated
        self._living = living

    def _train_epochs(self) -> str | None:
        elastic_average, sampler = self.elastic_average, self._parts.sampler
        self._report(deal=(self._epoch, sampler.state_dict()["consumed"]))
        self._synced_at = self._parts.optimizer.t  # before any step of this life
        self._synchronize()
        while self._epoch < self._parts.length.epochs:
            if elastic_average.leaving:
                return self._reason or self._stopping.at_once() or "another island has to stop"
            if elastic_average.index in elastic_average.after.sharing:
                self._train_on()
            else:
                self._look_on()
        while not self._is_first():
            self._synchronize()
        return None

    def _train_on(self) -> None:
        """To the end of the epoch, or until a meeting finds this island elsewhere."""
        elastic_average, batches = self.elastic_average, self._parts.batches
        for x, y, seconds in self._batches():
            left, before = len(batches) - 1, elastic_average.rounds
            self._reason = self._stopping.now() or self._reason
            self._report(
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
        """Where nobody is left of those who had samples, what they have not seen is dealt again."""
        self._reason = self._stopping.now() or self._reason
        self._report(
            deal=(self._epoch, self._parts.sampler.state_dict()["consumed"]), leaving=self._reason is not None
        )
        self._synchronize()

    def _report(self, **changed: Any) -> None:
        self.elastic_average.report = replace(self.elastic_average.report, **changed)

    def _synchronize(self) -> None:
        optimizer = self._parts.optimizer
        optimizer.average_models()
        if self.elastic_average.after.place.t == optimizer.t:  # who comes from elsewhere was not there
            self._note(optimizer.metrics)
        self._settle()

    def _settle(self) -> bool:
        """Go where the register says that the training is; whether this island was there, and has more to do
        before its samples are dealt again."""
        place, t = self.elastic_average.after.place, self._parts.optimizer.t
        if (place.t, place.as_assigned) == (t, self._assigned):
            return not self.elastic_average.leaving
        if (place.t, place.as_assigned) == (t, (self._epoch + 1, 0)) and self._assigned != (-1, 0):
            self._close_epoch()
            self._take_share()
            if self._epoch < self._parts.length.epochs and self._moving():
                self._move()
        else:
            self._go_to(place)
            self._take_share()
        return False

    def _go_to(self, place: Point) -> None:
        """Raises `PeerLost` where the others have started again from before: so must this island."""
        parts = self._parts
        steps, epochs = place.t - parts.optimizer.t, place.epoch - self._epoch
        if min(steps, epochs) < 0:
            raise PeerLost(f"the other islands have gone back to step {place.t} from {parts.optimizer.t}")
        if parts.scheduler is not None:
            _fast_forward(parts.scheduler, steps if self._per_step else epochs)
        if steps:
            self._progress.note(f"going on at step {place.t}, where the others are")
        parts.optimizer.resume_from(place.t, [{} for _ in parts.optimizer.param_groups], None)
        parts.warm_up.load_state_dict({"t": place.t})
        self._epoch = place.epoch

    def _take_share(self) -> None:
        """Of the samples as they were dealt, from where the others are."""
        elastic_average, sampler = self.elastic_average, self._parts.sampler
        place, dealt, sharing = (
            elastic_average.after.place,
            elastic_average.after.assigned_at,
            elastic_average.after.sharing,
        )
        here = sharing.index(elastic_average.index) if elastic_average.index in sharing else 0
        self._assigned = dealt.as_assigned
        if self._living is not None:
            self._living.follow(len(sharing), self._scaled_for)
        sampler.assigned(here, len(sharing))
        sampler.set_epoch(place.epoch, start=0)
        batches = self._parts.batches
        assert isinstance(batches, Batches)
        batches.start_after(dealt.seen, place.t - dealt.t)
        self._steps_per_epoch = place.t - dealt.t + len(batches)
        units = dict(elastic_average.after.units)
        if elastic_average.index in units:
            self._use(units[elastic_average.index])
        self._computed, self._steps = 0.0, 0
        self._report(step_seconds=0.0)  # that of before was of other units
        epochs_left = self._parts.length.epochs - place.epoch
        self._progress.expect(dealt.t + epochs_left * self._steps_per_epoch)
        self._meter.pause()

    def _use(self, units: int) -> None:
        """What this island has been given, where it need not be started again for that."""
        match self._resource:
            case "threads":
                torch.set_num_threads(units)
            case "samples":
                self._pass_size = max(1, units // self._parts.optimizer.topology.group_size)

    def _moving(self) -> set[int]:
        """The islands that have been given other ranks than they have."""
        if self._resource != "ranks":
            return set()
        units, members = dict(self.elastic_average.after.units), self.elastic_average.after.members
        return {
            member.replica_group
            for member in members
            if units.get(member.replica_group, member.ranks) != member.ranks
        }

    def _move(self) -> None:
        """Those with other ranks leave once a checkpoint is there, and all wait until they are back."""
        moving = self._moving()
        self._save()
        self._checkpoints.finish()
        self._parts.optimizer.average_models()
        if self.elastic_average.index in moving:
            self.elastic_average.move()
            raise Relocated
        self._synchronize()

    def _stands_for_all(self) -> bool:
        """At meetings alone: between them an island's model is its own."""
        return self._is_first() and self.elastic_average.after.place.t == self._parts.optimizer.t

    def _at_exit(self) -> str:
        t, after = self._parts.optimizer.t, self.elastic_average.after
        if set(after.replica_groups) - set(after.going) and not after.leaving:
            return f"left at step {t}, the other islands go on"
        return saved_at(t)

    def _is_first(self) -> bool:
        """Of those that go on, where any do: whoever has to stop need not wait for files."""
        counted, after = set(self.elastic_average.counted), self.elastic_average.after
        going = set(after.going)
        return self.elastic_average.index == min(
            counted - going or set(after.replica_groups) - going or counted
        )


@dataclass(frozen=True)
class ElasticRun:
    """What is particular to a run of one island among others; see `world.World`."""

    config: Config
    topology: Topology
    elastic_average: ElasticAverage

    @property
    def folder(self) -> Path:
        return run_folder.replica_group_folder(self.config.run.output_dir, self.elastic_average.index)

    def open_folder(self, resume: bool, open_files: ExitStack, devices: Mapping[str, int]) -> None:
        """Whoever started the islands has written down the configuration."""
        open_files.callback(self.elastic_average.close)
        with self.topology.raise_on_all_ranks("opening the folder of the island"):
            if self.topology.rank == 0:
                open_files.enter_context(run_folder.owned(self.folder, resume=True))
                with run_folder.usable(self.folder):
                    open_files.enter_context(run_folder.log_into(self.folder))
                    record_start(self.folder, self.topology, devices)

    def goes_on(self, resume: bool) -> bool:
        return True

    def own(self, state: dict[str, Any] | None) -> None:
        return None  # another island's chance is not this one's

    def loop(
        self, parts: TrainingSetup, checkpoints: Writer, stopping: Stopping, control: Communicator
    ) -> ElasticLoop:
        return ElasticLoop(
            self.config, parts, checkpoints, stopping, control,
            elastic_average=self.elastic_average, reallocated=self.config.rebalance.resource,
            living=living_of(self.config.lr_schedule, parts),
        )  # fmt: skip

    def conclude(self, complete: bool) -> None:
        """Who started the islands reports on all of them."""
        if complete:
            self.elastic_average.finish()


def living_of(schedule: LrScheduleSection, parts: TrainingSetup) -> Living | None:
    """What the learning rate follows the living islands by, if it is to."""
    if schedule.scale_with == "started":
        return None
    return Living(parts.warm_up, schedule.scaling)


def _fast_forward(scheduler: LRScheduler, times: int) -> None:
    with without_warnings():  # that no update came before: it did, elsewhere
        for _ in range(times):
            scheduler.step()
