"""One training run: prepare, train, save, report. Every rank of `hpcsgd train` runs this module."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpcsgd.checkpoint import Checkpoints, Writer, restore_newest
from hpcsgd.checkpoint.folder import titles
from hpcsgd.comm import Communicator, exit_all
from hpcsgd.config.schema import Config
from hpcsgd.core.by_rank_0 import by_rank_0
from hpcsgd.core.topology import Topology, raise_on_all_ranks
from hpcsgd.elastic.endings import Over, Relocated
from hpcsgd.errors import MOVED, STOPPED, UserError, count_text, in_file, in_section
from hpcsgd.files.atomic import replacing
from hpcsgd.models.weights import whole_state
from hpcsgd.report import trace
from hpcsgd.report.metrics import Metrics
from hpcsgd.report.run_folder import CHECKPOINTS, usable
from hpcsgd.report.summary import byte_text
from hpcsgd.start import log_joined
from hpcsgd.train.devices import form_job
from hpcsgd.train.length import warn_of_few
from hpcsgd.train.loop import TrainLoop
from hpcsgd.train.monitor import DistanceMonitor
from hpcsgd.train.pace import tuned
from hpcsgd.train.probe_answer import take_answer
from hpcsgd.train.process import compute_alike, join_world, keep_freed_memory, log_to_stdout, use_threads
from hpcsgd.train.static_run import StaticRun
from hpcsgd.train.stopping import Reasons, Stopping
from hpcsgd.train.tracing import Trace
from hpcsgd.train.training_setup import TrainingSetup, assemble

if TYPE_CHECKING:  # only replica groups and runs with loggers load them
    from hpcsgd.elastic.elastic_average import ElasticAverage
    from hpcsgd.report.loggers.processes import LoggerProcesses
    from hpcsgd.train.elastic_run import ElasticRun

log = logging.getLogger(__name__)


def run(path: Path, read: Callable[[], Config], resume: bool = False, probe: Path | None = None) -> None:
    """Train as the job file says, with the number of groups that `probe` found; every rank calls this.

    `read` reads the job file at `path`. The process ends with exit code `STOPPED` after a signal or the time
    limit. Then there is a checkpoint from which training can continue.
    """
    end_as(lambda: _run(*join_world(read), path, resume, probe))


def end_as(training: Callable[[], str | None]) -> None:
    """Run `training`, and end the process together with all other ranks.

    If `training` returns a reason why it stopped early, the exit code is `STOPPED`.
    """
    try:
        reason = training()
    except Relocated:
        exit_all(MOVED)
    except SystemExit as left:  # such as by the user's model: the other ranks would wait for this one
        raise RuntimeError(f"exit with code {left.code!r} in the middle of training") from left
    if reason is not None:
        exit_all(STOPPED)


def _run(world: Communicator, config: Config, path: Path, resume: bool, probe: Path | None) -> str | None:
    log_to_stdout(world.rank)
    monitor = None
    if probe is not None:
        with raise_on_all_ranks(world, "reading the probe"):
            config, monitor = take_answer(config, probe, world.size)
    world.timeout = config.parallel.timeout_s
    use_threads(config.training.threads)
    compute_alike(config.training.deterministic)
    keep_freed_memory()
    with in_file(path), in_section("parallel"):
        topology, elastic_average = form_job(world, config)
    section = config.training
    reasons = Reasons(section.time_limit_s, section.stop_before_end_s, asks_scheduler=topology.rank == 0)
    return train(config, topology, str(path), reasons, resume, monitor, elastic_average)


def train(
    config: Config,
    topology: Topology,
    source: str,
    reasons: Reasons,
    resume: bool,
    monitor: DistanceMonitor | None = None,
    elastic_average: ElasticAverage | None = None,
) -> str | None:
    """Train as `config`, read from the file `source`, says. Return why training stopped early, or None.

    In an elastic run `topology` is one replica group, and `elastic_average` connects it to other groups.
    Collective.
    """
    config = tuned(config, topology, source, resume)
    control = topology.world.dup_with_thread()
    setting = setting_of(config, topology, elastic_average)
    with topology.raise_on_all_ranks("reading checkpoints"):
        begun = to_begin(config, setting.goes_on(resume))
    parts = assemble(begun, topology, source)
    devices = Counter(topology.world.gather_objects(str(parts.device)))
    with ExitStack() as open_files:
        setting.open_folder(resume, open_files, devices)
        log_joined(topology.world)
        where = "" if devices.keys() == {"cpu"} else f", on {', '.join(sorted(devices))}"
        log.info(
            "%s of %s, %s an epoch%s",
            count_text(topology.total_groups, "group"), count_text(topology.group_size, "rank"),
            count_text(parts.steps_per_epoch, "step"), where,
        )  # fmt: skip
        warn_of_few(len(parts.sampler) * topology.group_size, begun.data.group_batch_size)
        if parts.by_torch is not None:
            size = byte_text(parts.by_torch)
            log.info(
                "FSDP sends %s per rank and backward pass (computed, not measured; reported separately)", size
            )
        if begun.model.init_from is not None:
            log.info("the model starts from %s", begun.model.init_from)
        return _train(setting, parts, Stopping(reasons, control), control, resume, open_files, monitor)


def _train(
    setting: StaticRun | ElasticRun,
    parts: TrainingSetup,
    stopping: Stopping,
    control: Communicator,
    resume: bool,
    open_files: ExitStack,
    monitor: DistanceMonitor | None = None,
) -> str | None:
    topology, folder = setting.topology, setting.config.run.output_dir
    checkpoints = folder / CHECKPOINTS
    writer = Writer(checkpoints, topology)
    loop = setting.loop(parts, writer, stopping, control)
    if setting.goes_on(resume):
        _go_on(setting, parts, Checkpoints(checkpoints, topology), loop)
    if (steps := setting.config.run.trace_steps) is not None:
        loop.tracer = Trace(
            topology, topology.world.dup_with_thread(), setting.folder / trace.NAME, steps, parts.optimizer.t
        )
    described, t, loggers = setting.config.run.loggers, parts.optimizer.t, None
    with topology.raise_on_all_ranks("opening the metrics"), usable(folder):
        if topology.rank == 0:
            loop.monitor = monitor
            if described:
                from hpcsgd.report.loggers.processes import LoggerProcesses, logger_run

                loggers = LoggerProcesses(described, logger_run(setting.folder, setting.config, t))
                open_files.enter_context(loggers)
            also = None if loggers is None else loggers.put
            loop.metrics = open_files.enter_context(
                Metrics(setting.folder / "metrics.jsonl", resumed_step=t, also=also)
            )
    try:
        reason = loop.train()
    except Over:
        writer.finish()
        if described:
            _close_loggers(loggers, topology)
        return None
    loop.tracer.finish()
    if reason is None:
        _save_model(folder, parts)
    if described:
        _close_loggers(loggers, topology)
    setting.conclude(complete=reason is None)
    return reason


def _close_loggers(loggers: LoggerProcesses | None, topology: Topology) -> None:
    """Close the loggers on rank 0. Other ranks wait here, because a wait at exit may not last as long."""
    by_rank_0(topology.world, "closing the loggers", lambda: None if loggers is None else loggers.close())


def to_begin(config: Config, goes_on: bool) -> Config:
    """Return `config`, without `init_from` if a checkpoint has the weights.

    The file that `init_from` names may be gone by then.
    """
    if goes_on and titles(config.run.output_dir / CHECKPOINTS):
        return replace(config, model=replace(config.model, init_from=None))
    return config


def setting_of(
    config: Config, topology: Topology, elastic_average: ElasticAverage | None
) -> StaticRun | ElasticRun:
    assert topology.is_elastic == (elastic_average is not None)
    if elastic_average is None:
        return StaticRun(config, topology)
    from hpcsgd.train.elastic_run import ElasticRun

    return ElasticRun(config, topology, elastic_average)


def _go_on(
    setting: StaticRun | ElasticRun, parts: TrainingSetup, checkpoints: Checkpoints, loop: TrainLoop
) -> None:
    topology = parts.optimizer.topology
    with topology.raise_on_all_ranks("reading checkpoints"):
        if topology.rank == 0:
            checkpoints.put_back()
    found = restore_newest(checkpoints, parts.optimizer)
    if found is None:
        log.info("no checkpoint to resume from: starting at the beginning")
        return
    saved, shared, own = found
    loop.resume_from(shared, setting.own(own))
    cut = "" if own is not None else f", cut anew for {topology.num_groups} × {topology.group_size}"
    if topology.num_groups != saved.P:
        cut += f"; the learning rate stays that of {count_text(saved.P, 'group')}"
    log.info("resuming at step %d from a checkpoint of %d × %d ranks%s", saved.step, saved.P, saved.K, cut)


def _save_model(folder: Path, parts: TrainingSetup) -> None:
    """Save the averaged model as a plain state_dict."""
    topology = parts.optimizer.topology
    with parts.optimizer.averaged_model():
        state = whole_state(parts.model, keeps=topology.rank == 0)

    by_rank_0(topology.world, "saving the model", lambda: _write_model(folder / "model.pt", state))


def _write_model(target: Path, state: Mapping[str, Any]) -> None:
    with usable(target.parent), replacing(target) as part:
        try:
            torch.save(state, part)
        except RuntimeError as error:  # in place of an `OSError`
            free = byte_text(shutil.disk_usage(target.parent).free)
            raise UserError(
                f"{target}: cannot be written: its disk fails or is full ({free} free): make space there, "
                "and pass --resume"
            ) from error
