"""One training run: prepare, train, save, report. What `hpcsgd train` does on every rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from hpcsgd.checkpoint import Checkpoints, restore
from hpcsgd.config.schema import Config, load
from hpcsgd.core.topology import Job, form_as_launched, together
from hpcsgd.errors import located
from hpcsgd.files.atomic import replacing
from hpcsgd.islands.meetings import Over
from hpcsgd.report import run_folder
from hpcsgd.report.metrics import Metrics, read
from hpcsgd.report.summary import summary, summary_text
from hpcsgd.training.assembly import Assembly, assemble
from hpcsgd.training.ensemble import MOVED, EnsembleLoop, Moved
from hpcsgd.training.loop import Loop, WorldLoop
from hpcsgd.training.probing import take_answer
from hpcsgd.training.process import keep_freed_memory, use_threads
from hpcsgd.training.stopping import STOPPED, Stopping
from hpcsgd.transport import Transport, leave_together
from hpcsgd.tuning.monitor import DistanceMonitor

log = logging.getLogger(__name__)


def run(path: Path, overrides: Sequence[str] = (), resume: bool = False, probe: Path | None = None) -> None:
    """Train as the job file says, with as many groups as `probe` found; every rank of the launch calls this.

    Ends with exit code `STOPPED` after a signal or the time limit, with a checkpoint to go on from.
    """
    try:
        reason = _run(path, overrides, resume, probe)
    except Moved:
        leave_together(MOVED)
    except SystemExit as left:  # of the user's model, say: the other ranks would wait for this one
        raise RuntimeError(f"exit with code {left.code!r} in the middle of training") from left
    if reason is not None:
        leave_together(STOPPED)


def _run(path: Path, overrides: Sequence[str], resume: bool, probe: Path | None) -> str | None:
    from hpcsgd.transport import mpi  # MPI starts when it is imported

    world = mpi.world()
    with together(world, "reading the job file"):
        config = load(path, overrides)
    _log_to_stdout(world.rank)
    monitor = None
    if probe is not None:
        with together(world, "reading the probe"):
            config, monitor = take_answer(config, probe, world.size)
    world.timeout = config.job.timeout
    use_threads(config.training.threads)
    keep_freed_memory()
    with located(f"{path}: [job]"):
        job = form_as_launched(world, config.job.groups, config.job.group_size)
    aside = job.world.apart()
    stopping = Stopping(job, aside, config.training.time_limit, config.training.stop_ahead)
    parts = assemble(config, job, str(path))
    with ExitStack() as open_files:
        if job.meetings is None:
            _open_folder(config, job, resume, open_files)
        else:
            open_files.callback(job.meetings.close)
            _open_island(config, job, open_files)
        return _train(config, parts, stopping, aside, resume, open_files, monitor)


def _train(
    config: Config,
    parts: Assembly,
    stopping: Stopping,
    aside: Transport,
    resume: bool,
    open_files: ExitStack,
    monitor: DistanceMonitor | None = None,
) -> str | None:
    job = parts.optimizer.job
    log.info("%d groups of %d ranks, %d steps an epoch", job.groups, job.K, parts.steps_per_epoch)
    checkpoints = Checkpoints(config.run.folder / "checkpoints", job)
    loop = _loop(config, parts, checkpoints, stopping, aside)
    if resume or job.meetings is not None:
        _go_on(parts, checkpoints, loop)
    if job.rank == 0:
        loop.monitor = monitor
        loop.metrics = open_files.enter_context(
            Metrics(own_folder(config, job) / "metrics.jsonl", resumed_step=parts.optimizer.t)
        )
    try:
        reason = loop.train()
    except Over:
        return None
    if reason is None:
        _save_model(config.run.folder, parts)
    if job.meetings is None:
        with job.together("reporting"):
            if job.rank == 0:
                _report(config.run.folder)
    elif reason is None:
        job.meetings.finish()
    return reason


def _loop(
    config: Config, parts: Assembly, checkpoints: Checkpoints, stopping: Stopping, aside: Transport
) -> Loop:
    if parts.optimizer.job.meetings is None:
        return WorldLoop(config, parts, checkpoints, stopping, aside)
    unit = config.reallocation.unit
    return EnsembleLoop(config, parts, checkpoints, stopping, aside, reallocated=unit)


def own_folder(config: Config, job: Job) -> Path:
    """Where the log and the metrics of this job are, or of this island."""
    folder = config.run.folder
    return folder if job.meetings is None else run_folder.island_folder(folder, job.meetings.island)


def _open_island(config: Config, job: Job, open_files: ExitStack) -> None:
    """Whoever started it has written down the configuration."""
    folder = own_folder(config, job)
    with job.together("opening the folder of the island"):
        if job.rank == 0:
            run_folder.open_run_folder(folder, resume=True)
            open_files.enter_context(run_folder.log_into(folder))


def _open_folder(config: Config, job: Job, resume: bool, open_files: ExitStack) -> None:
    folder = config.run.folder
    with job.together("opening the run folder"):
        if job.rank == 0:
            run_folder.open_run_folder(folder, resume=resume)
            open_files.enter_context(run_folder.log_into(folder))
            run_folder.write_config(folder, config)
            run_folder.write_versions(folder, mpi=job.world.backend.name, groups=job.P, group_size=job.K)


def _go_on(parts: Assembly, checkpoints: Checkpoints, loop: Loop) -> None:
    saved = checkpoints.newest()
    if saved is None:
        log.info("no checkpoint to resume from: starting at the beginning")
        return
    job = parts.optimizer.job
    shared, own = restore(saved, parts.optimizer)
    loop.take_up(shared, own if job.meetings is None else None)  # another island's chance is not this one's
    cut = "" if own is not None else f", cut anew for {job.P} × {job.K}"
    if saved.P != job.P:
        cut += f"; the learning rate stays that of {saved.P} groups"
    log.info("resuming at step %d from a checkpoint of %d × %d ranks%s", saved.step, saved.P, saved.K, cut)


def _save_model(folder: Path, parts: Assembly) -> None:
    """The averaged model, as a plain state_dict for whoever uses it."""
    job = parts.optimizer.job
    with parts.optimizer.averaged():
        state = {name: value.detach().clone() for name, value in parts.model.state_dict().items()}
    with job.together("saving the model"):
        if job.rank == 0:
            with replacing(folder / "model.pt") as part:
                torch.save(state, part)


def _report(folder: Path) -> None:
    from hpcsgd.report.curves import plot_curves  # matplotlib is slow to import

    records = read(folder / "metrics.jsonl")
    numbers = summary(records)
    run_folder.write_summary(folder, numbers)
    plot_curves(records, folder / "curves.png")
    log.info("%s\nwritten   %s", summary_text(numbers), folder)


def _log_to_stdout(rank: int) -> None:
    """Rank 0 tells; what the others have to say they raise."""
    package = logging.getLogger("hpcsgd")
    package.setLevel(logging.DEBUG if rank == 0 else logging.ERROR)
    handler = logging.StreamHandler(sys.stdout)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package.addHandler(handler)
