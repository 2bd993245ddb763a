"""`init`, which forms groups of the ranks that the launcher started."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator, joining
from hpcsgd.comm.backend_choice import AUTO, DeviceBackends, GivenBackends, chosen, local_device, share_thread
from hpcsgd.comm.streams import HOST
from hpcsgd.core.topology import Topology, form, raise_on_all_ranks, require_counts
from hpcsgd.elastic.join_info import join_info
from hpcsgd.errors import UserError, count_text, located
from hpcsgd.launcher import launched

if TYPE_CHECKING:  # only replica groups load it
    from hpcsgd.elastic.elastic_average import ElasticAverage

log = logging.getLogger(__name__)


class Formed(NamedTuple):
    """The result of `form_as_launched`."""

    topology: Topology
    elastic_average: ElasticAverage | None
    """The `replica_groups` of `topology` if this job is a replica group, else None."""


@checked
def init(
    groups: int | None = None,
    group_size: int | None = None,
    *,
    timeout_s: float = 600.0,
    device_backend: Mapping[str, str] | None = None,
    backend: str = "auto",
) -> Topology:
    """Return the topology of the ranks that the launcher started: `groups` groups, by default one.

    Without a launcher there is one rank and one group, whatever was requested; a warning says so. Collective.
    It makes communicators of its own, also if the script has initialized torch.distributed.

    Args:
        groups: Number of groups (P). It must divide the number of ranks. `hpcsgd.probe` finds a good number
            for a training. Default None.
        group_size: Ranks per group (K), instead of `groups` or consistent with it. If it is the number of
            ranks on a node, gradients stay within nodes. Default None.
        timeout_s: Seconds that a rank waits for the others before the job ends. Default 600.0.
        device_backend: Library for tensors on GPUs, for each of `intra_group` and `inter_group`: "auto",
            "mpi" (through host memory), "nccl" or "gpu_mpi". Default None: "auto" for both.
        backend: Library that connects the ranks: "mpi", or torch's "gloo", which needs no MPI. "auto" depends
            on the launcher: ranks of torchrun use gloo. Default 'auto'.

    Returns:
        The `Topology` for `DistributedOptimizer`, `Sampler` and `Loader`.

    Raises:
        UserError: If the numbers do not fit, the launcher's ranks differ from MPI's, ranks do not connect, or
            a given `device_backend` is unavailable.

    Example:
        >>> topology = hpcsgd.init(groups=2)     # mpiexec -n 4 python train.py
        >>> topology.num_groups, topology.group_size
        (2, 2)
    """
    _require_no_worker()
    require_counts(groups, group_size)
    if not 0 < timeout_s < math.inf:
        raise UserError(
            f"timeout_s = {timeout_s}: expected a number of seconds > 0", key="timeout_s", value=timeout_s
        )
    world = joining.world(timeout_s, backend)
    with raise_on_all_ranks(world, "choosing backends"):
        backends = DeviceBackends.of(device_backend or {})
    topology = form_as_launched(world, groups, group_size, backends).topology
    log_joined(world)
    return topology


def log_joined(world: Communicator) -> None:
    """Log which backend joined the ranks of `world`, and why it was chosen."""
    if world.rank == 0 and world.size > 1 and world.chosen:
        log.info("%s by %s", count_text(world.size, "rank"), world.chosen)


def _require_no_worker() -> None:
    """Stop a process that multiprocessing has spawned and that imports the script as if it were to train.

    The text is printed because such a process does not print the message of a SystemExit.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        print(
            "hpcsgd.init: called in a worker process that imported the script: "
            'put what the script does under `if __name__ == "__main__":`',
            file=sys.stderr, flush=True,
        )  # fmt: skip
        raise SystemExit(1)


def form_as_launched(
    world: Communicator,
    groups: int | None,
    group_size: int | None,
    backends: GivenBackends = AUTO,
    device: str = "auto",
) -> Formed:
    """Return the topology, as `form` does, with two exceptions.

    A replica group is one group. A script without a launcher is one rank, whatever groups it requests.
    Tensors on devices use the backends in `backends`. With the `device` "cpu" there are no such tensors.
    """
    if (invited := join_info()) is None:
        return Formed(_travelling(_formed(world, groups, group_size), backends, device), None)
    topology = form(world)
    elastic_average = invited.accept(topology.world)
    return Formed(
        _travelling(replace(topology, replica_groups=elastic_average), backends, device), elastic_average
    )


def _formed(world: Communicator, groups: int | None, group_size: int | None) -> Topology:
    if world.size == 1 and launched(os.environ) is None and (groups or 1, group_size or 1) != (1, 1):
        what, given = ("groups", groups) if groups else ("group_size", group_size)
        log.warning(
            "started without a launcher: one rank, one group; %s = %d is for `mpiexec -n …` or srun",
            what,
            given,
        )
        return form(world)
    return form(world, groups, group_size)


def _travelling(topology: Topology, backends: GivenBackends, device: str) -> Topology:
    own = local_device(topology.world, device)
    with (
        raise_on_all_ranks(topology.world, "choosing a backend"),
        located(f"device_backend intra_group = {backends.intra_group!r}", "device_backend", "intra_group"),
    ):
        intra_group, why_intra = chosen(topology.intra_group, backends.intra_group, own, inside=True)
    with (
        raise_on_all_ranks(topology.world, "choosing a backend"),
        located(f"device_backend inter_group = {backends.inter_group!r}", "device_backend", "inter_group"),
    ):
        inter_group, why_inter = chosen(topology.inter_group, backends.inter_group, own, inside=False)
    inter_group = share_thread(intra_group, inter_group)
    if own.device is not None and topology.rank == 0:
        log.info(
            "device tensors: in groups by %s, across groups by %s",
            _reported(intra_group, why_intra), _reported(inter_group, why_inter),
        )  # fmt: skip
    of_rank = {"local_rank": own.local_rank, "device": own.device or HOST}
    return replace(topology, intra_group=intra_group, inter_group=inter_group, **of_rank)


def _reported(ranks: Communicator, passed_over: str) -> str:
    return f"{ranks.device_backend} (not by {passed_over})" if passed_over else ranks.device_backend
