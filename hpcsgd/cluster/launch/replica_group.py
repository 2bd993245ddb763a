"""`hpcsgd launch --replica-group`: start one replica group of a run. Other groups start separately.

The groups find each other by the run folder, which the first group makes. At any time one of their launchers
runs the coordinator. A group that joins later continues where the others are.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcsgd.cluster.launch.elected import CoordinatorElection
from hpcsgd.cluster.launch.python import of_ranks
from hpcsgd.cluster.launch.run import coordinator_arguments, group_sizes, report, require_sense
from hpcsgd.cluster.launch.starter import sizes, starter
from hpcsgd.cluster.launch.supervisor import Supervisor
from hpcsgd.config.reader import read_toml
from hpcsgd.config.schema import Config, dump, load
from hpcsgd.elastic import event_log
from hpcsgd.elastic.addresses import require_own
from hpcsgd.elastic.coordinator_address import of_term
from hpcsgd.elastic.journal import FOLDER, last_claimed, newest
from hpcsgd.elastic.register import Phase
from hpcsgd.errors import UserError, count_text, in_file
from hpcsgd.files.atomic import new_folder
from hpcsgd.report import run_folder
from hpcsgd.report.loggers import require_loggers

ITS_OWN = (
    "parallel.group",  # their number and size
    "parallel.timeout_s",
    "parallel.backend",
    "parallel.device_backend",
    "run.output_dir",
    "data.path",
    "training.threads",
    "training.device",
    "training.time_limit_s",
)
"""Keys of the job file, or their beginnings, that may differ between groups: paths and hardware."""


def launch_replica_group(
    path: Path,
    replica_group: int,
    overrides: Sequence[str] = (),
    *,
    groups: int | None = None,
    group_size: int | None = None,
    host: str | None = None,
    restarts: int = 3,
    heartbeat_timeout: float = 10.0,
    timeout: float = 300.0,
    resume: bool = False,
    srun: Sequence[str] = (),
) -> int:
    """Train one replica group of the job file's run; return the exit code. Raises `UserError`."""
    config = load(path, overrides)
    require_sense(groups=groups, group_size=group_size, heartbeat_timeout=heartbeat_timeout, timeout=timeout)
    by = starter(srun)
    (K,) = sizes(1, group_size or config.parallel.group_size, by.ranks)
    count = len(group_sizes(path, config, 0, groups, K))
    if not 0 <= replica_group < count:
        raise UserError(
            f"--replica-group {replica_group}: of {count_text(count, 'group')}, they are 0 to {count - 1}"
        )
    if config.rebalance.resource == "ranks":
        raise UserError(
            "[rebalance] resource = ranks: separately started groups cannot move ranks",
            key=("rebalance", "resource"),
            file=path,
        )
    arguments = coordinator_arguments(path, config, count)
    with in_file(path):
        require_loggers(config.run.loggers or ())
    host = host or by.host
    require_own(host)
    folder = config.run.output_dir
    config = replace(config, parallel=replace(config.parallel, groups=count))
    made = _made_or_joined(path, folder, config, K, resume=resume)
    if newest(folder / FOLDER).phase is Phase.FINISHED:
        print(f"hpcsgd: {folder}: the training is complete", file=sys.stderr)
        return 0
    program = [of_ranks(), "-m", "hpcsgd", "train", str(path), *overrides]
    run_folder.replica_group_folder(folder, replica_group).mkdir(parents=True, exist_ok=True)
    coordinator = CoordinatorElection(
        folder, replica_group, heartbeat_timeout=heartbeat_timeout, host=host,
        replica_groups=count, timeout=timeout, **arguments,
    )  # fmt: skip
    supervisor = Supervisor(
        {replica_group: K}, count, program, folder, by, coordinator,
        restarts=restarts, heartbeat_timeout=heartbeat_timeout, timeout=timeout,
    )  # fmt: skip
    code = asyncio.run(supervisor.run())
    last = newest(folder / FOLDER)
    if supervisor.fault and made and _came_alone(folder):
        shutil.rmtree(folder)  # the folder must not block the next start, after the mistake is fixed
    elif replica_group == min(last.replica_groups, default=None):
        report(folder)
    return code


def _made_or_joined(path: Path, folder: Path, config: Config, K: int, *, resume: bool) -> bool:
    """Make the run folder, or join the run in it; return True if this launcher made the folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        try:
            with new_folder(folder) as part:
                run_folder.write_config(part, config)
                run_folder.write_versions(part, mpi=None, groups=config.parallel.groups or 1, group_size=K)
                (part / FOLDER).mkdir()
        except OSError:
            if not (folder / FOLDER).exists():
                raise
        else:
            return True
    if not (folder / FOLDER).exists():  # the folder of groups that were started together, or of another run
        run_folder.open_run_folder(folder, resume=resume)
        run_folder.write_config(folder, config)
        (folder / FOLDER).mkdir(exist_ok=True)
    elif _abandoned(folder):
        run_folder.write_config(folder, config)
    _require_same(path, folder, config)
    event_log.of_run(folder)  # raises here, not in the coordinator, if the log is damaged
    return False


def _came_alone(folder: Path) -> bool:
    return not newest(folder / FOLDER).generation and len([*(folder / "replica_groups").iterdir()]) == 1


def _abandoned(folder: Path) -> bool:
    """Return True if all groups left before the first synchronization, so that the job file may change."""
    terms = folder / FOLDER
    last = of_term(terms, last_claimed(terms))
    return last is not None and not last.address and not newest(terms).generation


def _require_same(path: Path, folder: Path, config: Config) -> None:
    theirs, ours = (
        {key: value for key, value in run_folder.flat(table) if not key.startswith(ITS_OWN)}
        for table in (read_toml(folder / run_folder.JOB_FILE), tomllib.loads(dump(config)))
    )
    if found := run_folder.changes(theirs, ours):
        raise UserError(f"{path}: the other groups of {folder} train by another job file: {found}")
