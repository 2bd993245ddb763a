"""`init`: what the launcher started becomes a job. The one module that knows the core and the islands."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from hpcsgd.core.topology import Job, form
from hpcsgd.islands.invitation import invitation
from hpcsgd.transport import Transport
from hpcsgd.transport.launcher import intended_size

log = logging.getLogger(__name__)


def init(groups: int | None = None, group_size: int | None = None, *, timeout: float = 600.0) -> Job:
    """The ranks that the launcher started, as `groups` groups or as groups of `group_size`; else one group.

    Without a launcher it is one rank and one group, whatever is asked for, which is warned of. Collective.

    Not to be confused with `torch.distributed.init_process_group`: nothing of torch.distributed is used.

    Args:
        groups: P; it must divide the number of ranks. `hpcsgd.probe` finds how many a training stands.
            Default None.
        group_size: K instead, or besides where both fit. As many as there are ranks on a node keep the
            gradients there. Default None.
        timeout: seconds that a rank may wait for the others before the job is ended. Default 600.0.

    Raises:
        UserError: where the numbers do not fit, or the launcher started something else than MPI sees.

    Example:
        >>> job = hpcsgd.init(groups=2)     # mpiexec -n 4 python train.py
        >>> job.P, job.K
        (2, 2)
    """
    from hpcsgd.transport import mpi  # MPI starts when it is imported

    return form_as_launched(mpi.world(timeout), groups, group_size)


def form_as_launched(world: Transport, groups: int | None, group_size: int | None) -> Job:
    """`form`, but an island is one group, and a script tried out without any launcher is one rank, whatever
    groups it asks for."""
    if (invited := invitation()) is not None:
        job = form(world)
        return replace(job, peers=invited.accept(job.world))
    if world.size == 1 and intended_size(os.environ) is None and (groups or 1, group_size or 1) != (1, 1):
        log.warning("started without a launcher: one rank, one group")
        return form(world)
    return form(world, groups, group_size)
