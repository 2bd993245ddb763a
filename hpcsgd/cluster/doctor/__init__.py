"""Check whether training will work with this cluster, launcher and MPI: a table, checks and timings."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hpcsgd.cluster.doctor.accelerators import look_at_accelerators
from hpcsgd.cluster.doctor.checks import check
from hpcsgd.cluster.doctor.dataset_file import open_everywhere
from hpcsgd.cluster.doctor.exercise import exercise
from hpcsgd.cluster.doctor.finding import Finding, Level
from hpcsgd.cluster.doctor.rank_info import examine, table
from hpcsgd.comm import exit_all, joining
from hpcsgd.core.topology import Topology
from hpcsgd.start import form_as_launched

__all__ = ["Finding", "Level", "run"]

TIMEOUT = 60.0  # seconds to wait for a rank; one that does not answer by then will not answer in training


def run(groups: int | None = None, group_size: int | None = None, data_file: Path | None = None) -> None:
    """Print a table of the ranks and the findings, on rank 0; all ranks that were started call this.

    The process ends with exit code 1 if a finding is an error. Warnings do not count.
    """
    # no warnings while groups are formed, because the findings report the same problems
    logging.getLogger("hpcsgd").setLevel(logging.ERROR)
    topology = form_as_launched(joining.world(TIMEOUT), groups, group_size).topology
    ranks = topology.world.gather_objects(examine(topology, topology.world.backend.thread_level))
    _tell(topology, table(ranks, grouped=groups is not None or group_size is not None))
    found = check(ranks, topology.group_size, os.environ)
    if data_file is not None:
        found.append(open_everywhere(topology.world, data_file))
    found += look_at_accelerators(topology)
    found += exercise(topology.world)
    _tell(topology, "\n".join(map(str, found)))
    if any(finding.level is Level.ERROR for finding in found):
        exit_all(1)


def _tell(topology: Topology, text: str) -> None:
    if topology.rank == 0:
        print(text, flush=True)
