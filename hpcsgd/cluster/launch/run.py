"""`hpcsgd launch`: a whole run of elastic replica groups, from the job file to the report."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpcsgd.checkpoint.manifest import remove_unfinished
from hpcsgd.cluster.launch.coordinator_process import CoordinatorProcess
from hpcsgd.cluster.launch.python import of_ranks
from hpcsgd.cluster.launch.starter import sizes, starter
from hpcsgd.cluster.launch.supervisor import Supervisor
from hpcsgd.config.schema import Config, MethodSection, load
from hpcsgd.core.averager import Traits
from hpcsgd.core.waits import Living, require_quorum
from hpcsgd.elastic import event_log
from hpcsgd.elastic.journal import FOLDER, REGISTER
from hpcsgd.elastic.resource_budget import ResourceBudget
from hpcsgd.errors import UserError, count_text, in_file, in_section
from hpcsgd.report import end_of_run, run_folder
from hpcsgd.report.loggers import require_loggers
from hpcsgd.train.parts import make_method


def launch(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    groups: int | None = None,
    group_size: int | None = None,
    restarts: int = 3,
    heartbeat_timeout: float = 10.0,
    timeout: float = 300.0,
    resume: bool = False,
    srun: Sequence[str] = (),
) -> int:
    """Train as the job file says, with elastic groups; return the exit code. Raises `UserError`."""
    config = load(path, overrides)
    require_sense(groups=groups, group_size=group_size, heartbeat_timeout=heartbeat_timeout, timeout=timeout)
    by = starter(srun)
    K = group_sizes(path, config, by.ranks, groups, group_size)
    arguments = coordinator_arguments(path, config, len(K))
    with in_file(path):
        require_loggers(config.run.loggers or ())
    folder = config.run.output_dir
    if (folder / FOLDER).exists():
        raise UserError(
            f"{folder}: the groups of this run start separately: give --replica-group, or another [run] "
            "output_dir"
        )
    fresh = not folder.exists()
    with run_folder.owned(folder, resume=resume):
        with run_folder.usable(folder):
            remove_unfinished(folder / run_folder.CHECKPOINTS)
            parallel = replace(config.parallel, groups=len(K), group_size=None)
            run_folder.write_config(folder, replace(config, parallel=parallel))
            run_folder.write_versions(folder, mpi=None, groups=len(K), group_size=K[0])
            (folder / REGISTER).unlink(missing_ok=True)  # from an earlier start, whose groups have ended
            event_log.of_run(folder)  # raises here, not in the coordinator, if the log is damaged
        program = [of_ranks(), "-m", "hpcsgd", "train", str(path), *overrides]
        budget = budget_of(config)
        coordinator = CoordinatorProcess(
            replica_groups=len(K), token=secrets.token_hex(32), heartbeat_timeout=heartbeat_timeout,
            timeout=timeout, folder=str(folder), host=by.host, port=0, **arguments,
        )  # fmt: skip
        supervisor = Supervisor(
            dict(enumerate(K)), len(K), program, folder, by, coordinator,
            restarts=restarts, heartbeat_timeout=heartbeat_timeout, timeout=timeout,
            moves_ranks=budget is not None and budget.resource == "ranks",
        )  # fmt: skip
        code = asyncio.run(supervisor.run())
        if supervisor.fault and fresh:
            shutil.rmtree(folder)  # the folder must not block the next start, after the mistake is fixed
        else:
            report(folder)
        return code


def group_sizes(
    path: Path, config: Config, ranks: int, groups: int | None = None, group_size: int | None = None
) -> list[int]:
    """Return the number of ranks of each group. `ranks` is that of the allocation, or 0 without one.

    Raises `UserError` if the job file's method does not support elastic groups.
    """
    with in_file(path):
        if not _traits(config.method).elastic:
            raise UserError(
                f"[method] name = {config.method.name}: elastic groups need ensemble_sync",
                key=("method", "name"),
                value=config.method.name,
            )
    K = sizes(groups or config.parallel.groups, group_size or config.parallel.group_size, ranks)
    B = config.data.group_batch_size
    if max(K) > B:
        raise UserError(
            f"[data] group_batch_size = {B}: too few samples for a group of {count_text(max(K), 'rank')}",
            key=("data", "group_batch_size"),
            value=B,
            file=path,
        )
    return K


def coordinator_arguments(path: Path, config: Config, groups: int) -> dict[str, Any]:
    """Return the arguments of the coordinator's process that the job file determines.

    Raises `UserError` if its quorum is larger than the number of `groups`.
    """
    waits, budget = _traits(config.method).waits, budget_of(config)
    with in_file(path), in_section("method"):
        require_quorum(waits, groups)
    quorum, enough = waits.quorum if isinstance(waits, Living) else None, {}
    if quorum is not None:
        enough = {"quorum": quorum.groups, "grace": quorum.grace, "late_rounds": quorum.late_rounds}
    return {"budget": None if budget is None else asdict(budget), **enough}


def _traits(section: MethodSection) -> Traits:
    return make_method(section, steps_per_epoch=1, total_steps=10**9).averager.traits


def require_sense(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: must be more than 0")


def budget_of(config: Config) -> ResourceBudget | None:
    section = config.rebalance
    if section.resource == "none":
        return None
    cost = section.cost_s if section.cost_s is not None else (20.0 if section.resource == "ranks" else 0.0)
    return ResourceBudget(
        section.resource, section.total or 1, section.min_gain, cost, config.training.epochs or 1
    )


def report(folder: Path) -> None:
    """Write the report of the whole run to its folder, and print it."""
    if text := end_of_run.report(folder):
        print(text, flush=True)
