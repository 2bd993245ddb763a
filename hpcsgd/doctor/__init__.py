"""Is this cluster, launcher and MPI fit for training? One table of the ranks, checks, a measured exercise."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hpcsgd.core.topology import Job
from hpcsgd.doctor.accelerators import look_at_accelerators
from hpcsgd.doctor.checks import check
from hpcsgd.doctor.exercise import exercise
from hpcsgd.doctor.finding import Finding, Level
from hpcsgd.doctor.rank_info import examine, table
from hpcsgd.doctor.stores import open_everywhere
from hpcsgd.start import form_as_launched
from hpcsgd.transport import leave_together

__all__ = ["Finding", "Level", "run"]

TIMEOUT = 60.0  # seconds; who does not answer in this time will not answer in training


def run(groups: int | None = None, group_size: int | None = None, store: Path | None = None) -> None:
    """Print the table and the findings on rank 0; every rank of the launch calls this.

    Ends with exit code 1 where something is wrong; warnings are none of it.
    """
    from hpcsgd.transport import mpi  # MPI starts when it is imported

    logging.getLogger("hpcsgd").setLevel(logging.ERROR)  # the findings say what the groups would warn of
    job = form_as_launched(mpi.world(TIMEOUT), groups, group_size)
    ranks = job.world.gather_objects(examine(job, mpi.thread_level()))
    _tell(job, table(ranks, grouped=groups is not None or group_size is not None))
    found = check(ranks, job.K, os.environ)
    if store is not None:
        found.append(open_everywhere(job.world, store))
    found += look_at_accelerators(job)
    found += exercise(job.world)
    _tell(job, "\n".join(map(str, found)))
    if any(finding.level is Level.ERROR for finding in found):
        leave_together(1)


def _tell(job: Job, text: str) -> None:
    if job.rank == 0:
        print(text, flush=True)
