"""A run with a fixed set of ranks, in which all ranks end if one of them fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hpcsgd.checkpoint import Writer
from hpcsgd.checkpoint.manifest import remove_unfinished
from hpcsgd.comm import Communicator
from hpcsgd.config.schema import Config
from hpcsgd.core.by_rank_0 import by_rank_0
from hpcsgd.core.topology import Topology
from hpcsgd.report import run_folder
from hpcsgd.train.loop import TrainLoop
from hpcsgd.train.stopping import Stopping, saved_at
from hpcsgd.train.training_setup import TrainingSetup

log = logging.getLogger(__name__)


class StaticLoop(TrainLoop):
    """A training loop that runs one epoch after the other."""

    def _train_epochs(self) -> str | None:
        self._forget_recorded()
        if (reason := self._evaluate_if_time()) is not None:
            return reason
        while not self._over():
            if (reason := self._finish_epoch()) is not None:
                return reason
        return None

    def _at_exit(self) -> str:
        return saved_at(self._parts.optimizer.t)

    def _stands_for_all(self) -> bool:
        return True

    def _finish_epoch(self) -> str | None:
        for x, y, data_seconds in islice(self._batches(), self._left()):
            self._step(x, y, data_seconds)
            if (reason := self._reason_to_stop()) is not None:
                self._read_meter()
                return reason
        self._close_epoch(cut=len(self._parts.batches) > 0)
        self._save_epoch()
        return self._evaluate_if_time()

    def _evaluate_if_time(self) -> str | None:
        """Evaluate if that is due, and return the reason to stop before or after it, or None.

        An evaluation may take longer than the time that is left after a signal. A run that has stopped before
        it, or was killed in it, goes on from the checkpoint of before with this evaluation.
        """
        if self._to_evaluate is None:
            return None
        if (reason := self._reason_to_stop(at_once=True)) is not None:
            return reason
        self._evaluate()
        return None if self._over() else self._reason_to_stop(at_once=True)


def record_start(folder: Path, topology: Topology, devices: Mapping[str, int]) -> None:
    """Record the ranks, backends and devices of this start of the run; called by one rank."""
    run_folder.write_versions(
        folder,
        mpi=topology.world.backend.name,
        groups=topology.num_groups,
        group_size=topology.group_size,
        devices=devices,
        device_backend={
            "intra_group": topology.intra_group.device_backend,
            "inter_group": topology.inter_group.device_backend,
        },
    )


@dataclass(frozen=True)
class StaticRun:
    """What a static run does differently from an elastic run; the counterpart is `ElasticRun`."""

    config: Config
    topology: Topology

    @property
    def folder(self) -> Path:
        """The folder of the run's log and metrics."""
        return self.config.run.output_dir

    def open_folder(self, resume: bool, open_files: ExitStack, devices: Mapping[str, int]) -> None:
        """Open the run folder on rank 0. `devices` says how many ranks train on which device."""
        topology, folder = self.topology, self.folder
        with topology.raise_on_all_ranks("opening the run folder"):
            if topology.rank == 0:
                open_files.enter_context(run_folder.owned(folder, resume=resume))
                with run_folder.usable(folder):
                    remove_unfinished(folder / run_folder.CHECKPOINTS)
                    open_files.enter_context(run_folder.log_into(folder))
                    run_folder.write_config(folder, self.config)
                    record_start(folder, topology, devices)

    def goes_on(self, resume: bool) -> bool:
        """Return whether the run begins at the newest checkpoint, if there is one."""
        return resume

    def own(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the part that this run restores of the `state` that a rank saved for itself."""
        return state

    def loop(
        self, parts: TrainingSetup, checkpoints: Writer, stopping: Stopping, control: Communicator
    ) -> StaticLoop:
        return StaticLoop(self.config, parts, checkpoints, stopping, control)

    def conclude(self, complete: bool) -> None:
        """Log the report of the run. If the training is `complete`, its model has been saved."""
        by_rank_0(self.topology.world, "reporting", lambda: _report(self.folder))


def _report(folder: Path) -> None:
    """Log the report of the run in `folder`. Only rank 0 calls this, to spare the other ranks the import."""
    from hpcsgd.report.end_of_run import report

    with run_folder.usable(folder):
        log.info("%s", report(folder))
