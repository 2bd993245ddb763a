"""``hpcsgd launch``: groups that may die, each a job of its own."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import told_in_one_line
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
    """Train with groups that may die and come back: on this machine, or inside a Slurm job.

    With --replica-group only that group is started. The others are started likewise, whenever there is room
    for them; they find each other by the run folder.

    :param job: The TOML file; its method is ensemble_sync.
    :param overrides: Keys of the file to change, as in --training.epochs 3 --method.sync_every 4.
    :param groups: How many groups; else groups of the [parallel] section.
    :param group_size: Ranks of each group; else that of the [parallel] section, the tasks by groups, or 1.
    :param max_restarts: How often a group that died is started again.
    :param heartbeat_timeout: Seconds after which a group that nothing is heard of is left behind.
    :param timeout: Seconds to wait for a group that lives but does not arrive at a meeting.
    :param replica_group: The number of the one group that is to be started here, from 0.
    :param host: With --replica-group, the address of this host at which the others can reach it.
    :param resume: Go on from the last checkpoint in the run folder.
    :param srun: Options of srun, as in "--mpi=pmi2".
    """
    with told_in_one_line(job, overrides):
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
            silence=heartbeat_timeout, timeout=timeout, resume=resume, srun=srun.split(),
        )  # fmt: skip
    sys.exit(code)
