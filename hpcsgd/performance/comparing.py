"""``hpcsgd compare``: train the variants of a job file, one after the other, on the same ranks."""

from __future__ import annotations

import gc
import json
import logging
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcsgd.comm import Communicator, PeerLost
from hpcsgd.config.reader import read_toml
from hpcsgd.config.schema import Config, RunSection, dump
from hpcsgd.config.variants import folder_name
from hpcsgd.core.by_rank_0 import by_rank_0
from hpcsgd.core.topology import Topology, raise_on_all_ranks
from hpcsgd.errors import UserError, count_text, in_file, in_section, located
from hpcsgd.files.atomic import replacing
from hpcsgd.report import run_folder
from hpcsgd.report.comparison import Comparison, Entry, comparison_text, read_comparison, write_comparison
from hpcsgd.report.metrics import read
from hpcsgd.train.devices import form_job
from hpcsgd.train.process import compute_alike, join_world, keep_freed_memory, log_to_stdout, use_threads
from hpcsgd.train.reduce_settings import as_it_began
from hpcsgd.train.run import end_as, train
from hpcsgd.train.stopping import Reasons
from hpcsgd.train.training_setup import assemble

log = logging.getLogger(__name__)

Read = Callable[[], Mapping[str, Config]]
"""A function that reads a job file and returns the configuration of each variant by its label."""
OWN_TO_A_START = (
    *(("parallel", "timeout_s"), ("run", "output_dir"), ("run", "loggers")),
    *(("training", "time_limit_s"), ("training", "stop_before_end_s")),
    *(("training", name) for name in ("bucket_cap_mb", "overlap_grad_reduce", "overlap_param_gather")),
    *(("training", name) for name in ("autotune_steps", "machine")),
)
"""Sections and keys of a job file that may change when a comparison is resumed."""


@dataclass(frozen=True)
class Trial:
    """One variant to train: its label, its configuration and its topology on this rank."""

    label: str
    config: Config
    topology: Topology

    @property
    def folder(self) -> Path:
        return self.config.run.output_dir


def run(path: Path, read_variants: Read, target: float | None, resume: bool) -> None:
    """Train each variant of the job file and write the comparison; all ranks that were started call this.

    `read_variants` reads the job file at `path`. After a signal or at the time limit the process writes a
    checkpoint and ends with exit code `STOPPED`.
    """
    end_as(lambda: _run(path, read_variants, target, resume))


def _run(path: Path, read_variants: Read, target: float | None, resume: bool) -> str | None:
    world, first = join_world(lambda: next(iter(read_variants().values())))
    chosen = read_variants()
    log_to_stdout(world.rank)
    section = first.training  # all variants have the same section
    reasons = Reasons(section.time_limit_s, section.stop_before_end_s, asks_scheduler=world.rank == 0)
    use_threads(section.threads)
    compute_alike(section.deterministic)
    keep_freed_memory()
    return compare(world, path, chosen, reasons, target=target, resume=resume)


def folder_of(run: RunSection) -> Path:
    """Return the folder of the comparison, next to the folder that the job file names for its run."""
    return run.output_dir.with_name(f"{run.output_dir.name}-compare")


def compare(
    world: Communicator,
    path: Path,
    chosen: Mapping[str, Config],
    reasons: Reasons,
    *,
    target: float | None = None,
    resume: bool = False,
) -> str | None:
    """Train the variants `chosen`, and return why the training stopped early, or None. Collective.

    All variants of the job file at `path` are built before the first one is trained, so that mistakes show
    early.
    """
    trials = [_prepared(world, path, label, config) for label, config in chosen.items()]
    folder = trials[0].folder.parent
    with ExitStack() as held:
        with raise_on_all_ranks(world, "opening the folder of the comparison"):
            if world.rank == 0:
                held.enter_context(run_folder.owned(folder, resume=resume))
                with run_folder.usable(folder):
                    _require_begun_so(folder, trials, world.size)
        return _trained(world, path, trials, reasons, folder, target=target, resume=resume)


def _trained(
    world: Communicator,
    path: Path,
    trials: Sequence[Trial],
    reasons: Reasons,
    folder: Path,
    *,
    target: float | None,
    resume: bool,
) -> str | None:
    """Train the variants that are not complete, and return why training stopped early, or None."""
    complete: set[str] = world.gather_objects(_completed(folder) if world.rank == 0 else None)[0]
    reason = None
    for number, trial in enumerate(trials, start=1):
        done = trial.label in complete
        log.info("\n%s (%d of %d)%s", trial.label, number, len(trials), ": complete already" if done else "")
        if not done:
            reason = _train(trial, path, reasons, resume=resume)
            complete |= {trial.label} if reason is None else set()
        by_rank_0(world, "comparing", partial(_write, folder, trials, complete, target, world.size))
        if reason is not None:
            break
    by_rank_0(world, "comparing", lambda: _show(folder, _comparison(trials, complete, target)))
    return reason


def _prepared(world: Communicator, path: Path, label: str, config: Config) -> Trial:
    """Return the trial of variant `label`. Collective; raises `JobError` if the variant cannot be built."""
    with located(f"variant {label!r}"):
        world.timeout = config.parallel.timeout_s
        with in_file(path), in_section("parallel"):
            topology = form_job(world, config).topology
        assemble(config, topology, str(path))
    gc.collect()  # models and optimizers refer to each other in cycles
    folder = folder_of(config.run) / folder_name(label)
    return Trial(label, replace(config, run=replace(config.run, output_dir=folder)), topology)


def _train(trial: Trial, path: Path, reasons: Reasons, *, resume: bool) -> str | None:
    """Train one variant, free its memory, and return why the training stopped early, or None."""
    world, timeout = trial.topology.world, trial.config.parallel.timeout_s
    world.timeout = timeout
    with located(f"variant {trial.label!r}"):
        reason = train(trial.config, trial.topology, str(path), reasons, resume)
    if not world.close_dups(timeout):  # ends the threads that served requests of other ranks
        raise PeerLost(f"variant {trial.label!r}: communication in flight {timeout:g} s after its end")
    gc.collect()
    return reason


def _require_begun_so(folder: Path, trials: Sequence[Trial], ranks: int) -> None:
    """Raise `UserError` if an earlier start of the comparison in `folder` had other settings or ranks."""
    if not _reported(folder):
        with replacing(folder / "compare.json") as part:
            part.write_text(json.dumps({"ranks": ranks, "variants": []}))
    before = _reported(folder).get("ranks")
    if before != ranks:
        raise UserError(
            f"{folder}: was begun on {count_text(before or 0, 'rank')}, and here are {ranks}: go on with "
            "as many"
        )
    for trial in trials:
        job = trial.folder / run_folder.JOB_FILE
        asked = as_it_began(trial.config)
        if job.exists() and (found := run_folder.changes(_lasting(read_toml(job)), _lasting(asked))):
            raise UserError(f"{trial.folder}: was begun otherwise: {found}: choose another [run] output_dir")


def _lasting(config: Config | dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must not change when a comparison is resumed."""
    table = tomllib.loads(dump(config)) if isinstance(config, Config) else config
    for section, key in OWN_TO_A_START:
        table.get(section, {}).pop(key, None)
    return table


def _reported(folder: Path) -> dict[str, Any]:
    """Return the content of ``compare.json`` in `folder`, or an empty dict if there is no such file."""
    file = folder / "compare.json"
    return read_comparison(file) if file.exists() else {}


def _completed(folder: Path) -> set[str]:
    return {row["label"] for row in _reported(folder)["variants"] if row.get("complete")}


def _write(
    folder: Path, trials: Sequence[Trial], complete: set[str], target: float | None, ranks: int
) -> None:
    write_comparison(folder, _comparison(trials, complete, target), ranks=ranks)


def _comparison(trials: Sequence[Trial], complete: set[str], target: float | None) -> Comparison:
    """Return the comparison of those `trials` whose training has begun."""
    begun = [(trial, file) for trial in trials if (file := trial.folder / "metrics.jsonl").exists()]
    entries = [
        Entry(
            trial.label,
            trial.topology.num_groups,
            trial.topology.group_size,
            trial.label in complete,
            read(file),
        )
        for trial, file in begun
    ]
    return Comparison(entries, target)


def _show(folder: Path, comparison: Comparison) -> None:
    from hpcsgd.report.comparison_picture import plot_comparison  # matplotlib is slow to import

    plot_comparison(comparison, folder / "compare.png")
    log.info("\n%s\nwritten   %s", comparison_text(comparison), folder)
