"""``hpcsgd launch``: train with elastic groups, each of which is a job of its own."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import errors_in_one_line
from hpcsgd.cli.words import JobKeys
from hpcsgd.errors import UserError


def launch(
    job: Path,
    /,
    *overrides: JobKeys,
    groups: int | None = None,
    group_size: int | None = None,
    max_restarts: int = 3,
    heartbeat_timeout: float = 10.0,
    timeout: float = 300.0,
    replica_group: int | None = None,
    host: str | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    srun: str = "",
) -> None:
    """Train with groups that may fail and return: on this machine, or inside a Slurm job.

    With --replica-group only that group is started. Start the others in the same way, at any time; they
    find each other by the run folder.

    :param job: The TOML file; its method is ensemble_sync.
    :param overrides: Keys of the file to change, such as --training.epochs 3 --method.sync_every 4.
    :param groups: The number of groups; default: groups of the [parallel] section.
    :param group_size: Ranks of each group; default: that of [parallel], or Slurm's tasks / groups, or 1.
    :param max_restarts: How often a group that died is restarted.
    :param heartbeat_timeout: Seconds without a message after which a group counts as lost.
    :param timeout: Seconds to wait for a group that is alive but does not come to average.
    :param replica_group: The number of the one group to start here, from 0.
    :param host: With --replica-group, the address of this host at which the others can reach it.
    :param resume: Continue from the last checkpoint in the run folder.
    :param srun: Options of srun, such as "--mpi=pmi2".
    """
    with errors_in_one_line(job, overrides):
        from hpcsgd.cluster.launch import launch as start_all
        from hpcsgd.cluster.launch import launch_replica_group

        if replica_group is None and host is not None:
            raise UserError(f"--host {host}: only with --replica-group")
        start = (
            start_all
            if replica_group is None
            else partial(launch_replica_group, replica_group=replica_group, host=host)
        )
        code = start(
            job, overrides=overrides, groups=groups, group_size=group_size, restarts=max_restarts,
            heartbeat_timeout=heartbeat_timeout, timeout=timeout, resume=resume, srun=srun.split(),
        )  # fmt: skip
    sys.exit(code)
