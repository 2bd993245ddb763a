"""The ranks as Accelerate sees them: torch's default process group and environment variables.

Accelerate does not know MPI. It takes its rank and its number of processes from torch's default group, and
finds out by environment variables whether there are several processes, and which device each of them has.
"""

from __future__ import annotations

import os

from hpcsgd.core.topology import Topology
from hpcsgd.errors import UserError, count_text
from hpcsgd.launcher import as_torchrun_sets
from hpcsgd.start import init

ON_CPU = "ACCELERATE_USE_CPU"
"""Accelerate's variable for a training on CPUs, which it cannot find out by itself for several processes."""


def topology_of(call: str, topology: Topology | None, groups: int | None) -> Topology:
    """Return the given `topology`, or a new one of `groups`; collective.

    Raises:
        UserError: If both are given, or neither.
    """
    if (topology is None) == (groups is None):
        given = "neither" if topology is None else "both"
        raise UserError(f"{call}: expected topology= or groups=, given {given}")
    return init(groups=groups) if topology is None else topology


def show_ranks(topology: Topology, *, cpu: bool = False) -> None:
    """Make torch's default group and the variables that Accelerate reads; collective.

    `cpu`: train on CPUs even if there are accelerators.

    Raises:
        UserError: If torch has a default group of other ranks, or ranks share a GPU.
    """
    on_cpu = cpu or topology.device.type == "cpu"
    topology.mesh("cpu" if on_cpu else topology.device.type)
    nodes = topology.world.gather_objects(topology.world.backend.node)
    local_size = nodes.count(topology.world.backend.node)
    os.environ |= as_torchrun_sets(topology.rank, topology.world_size, topology.local_rank, local_size)
    if on_cpu:
        os.environ[ON_CPU] = "true"


def require_same_ranks(topology: Topology, rank: int, size: int, remedy: str) -> None:
    """Raise `UserError` on all ranks unless Accelerate sees the ranks of `topology`; collective."""
    with topology.raise_on_all_ranks("comparing the ranks with Accelerate's"):
        if (rank, size) != (topology.rank, topology.world_size):
            raise UserError(
                f"for Accelerate this is rank {rank} of {size}, and for hpcsgd rank {topology.rank} of "
                f"{count_text(topology.world_size, 'rank')}: {remedy}"
            )
