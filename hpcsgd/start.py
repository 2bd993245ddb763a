"""`init`: what the launcher started becomes a job. The one module that knows the core and the islands."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator, joining
from hpcsgd.comm.backend_choice import AUTO, DeviceBackends, GivenBackends, chosen, local_device, share_thread
from hpcsgd.comm.streams import HOST
from hpcsgd.core.topology import Topology, form, raise_on_all_ranks, require_counts
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.join_info import join_info
from hpcsgd.errors import UserError, count_text, located
from hpcsgd.launcher import launched

log = logging.getLogger(__name__)


class Formed(NamedTuple):
    """What `form_as_launched` returns."""

    topology: Topology
    elastic_average: ElasticAverage | None
    """The peers of `job`, where it is an island; otherwise None."""


@checked
def init(
    groups: int | None = None,
    group_size: int | None = None,
    *,
    timeout_s: float = 600.0,
    device_backend: Mapping[str, str] | None = None,
    backend: str = "auto",
) -> Topology:
    """The ranks that the launcher started, as `groups` groups or as groups of `group_size`; else one group.

    Without a launcher it is one rank and one group, whatever is asked for, which is warned of. Collective.

    Not to be confused with `torch.distributed.init_process_group`: hpcsgd has groups of its own, which are
    nobody else's. Ranks that `torchrun` has started meet without MPI, by gloo.

    Args:
        groups: P; it must divide the number of ranks. `hpcsgd.probe` finds how many a training stands.
            Default None.
        group_size: K instead, or besides where both fit. As many as there are ranks on a node keep the
            gradients there. Default None.
        timeout_s: seconds that a rank may wait for the others before the job is ended. Default 600.0.
        device_backend: by which library tensors on GPUs travel, in the `intra_group` and in `inter_group`:
            each "auto", "mpi" (by way of host memory), "nccl" or "gpu_mpi". Default None: "auto" for both.
        backend: what joins the ranks: "mpi", or torch's "gloo", which needs no MPI; "auto" goes by what has
            started them. Default 'auto'.

    Raises:
        UserError: where the numbers do not fit, the launcher started something else than MPI sees, ranks do
            not come together, or a device_backend other than "auto" cannot be had.

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
    with raise_on_all_ranks(world, "choosing transports"):
        wishes = DeviceBackends.of(device_backend or {})
    topology = form_as_launched(world, groups, group_size, wishes).topology
    log_joined(world)
    return topology


def log_joined(world: Communicator) -> None:
    """Log which backend joined the ranks of `world`, and why it was chosen."""
    if world.rank == 0 and world.size > 1 and world.chosen:
        log.info("%s by %s", count_text(world.size, "rank"), world.chosen)


def _require_no_worker() -> None:
    """A process that multiprocessing has spawned imports the script again, as if it were to train, too. It
    does not print what a SystemExit says."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        print(
            "hpcsgd: a worker process, which imports the script to find what it works with, has come to "
            'hpcsgd.init: put what the script does under `if __name__ == "__main__":`',
            file=sys.stderr, flush=True,
        )  # fmt: skip
        raise SystemExit(1)


def form_as_launched(
    world: Communicator,
    groups: int | None,
    group_size: int | None,
    wished: GivenBackends = AUTO,
    device: str = "auto",
) -> Formed:
    """`form`, but an island is one group, and a script tried out without any launcher is one rank, whatever
    groups it asks for. Tensors on devices travel as `wished`; with the `device` "cpu" there are none."""
    if (invited := join_info()) is None:
        return Formed(_travelling(_formed(world, groups, group_size), wished, device), None)
    topology = form(world)
    elastic_average = invited.accept(topology.world)
    return Formed(
        _travelling(replace(topology, replica_groups=elastic_average), wished, device), elastic_average
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


def _travelling(topology: Topology, wished: GivenBackends, device: str) -> Topology:
    own = local_device(topology.world, device)
    with (
        raise_on_all_ranks(topology.world, "choosing a transport"),
        located(f"device_backend intra_group = {wished.intra_group!r}", "device_backend", "intra_group"),
    ):
        group, why_group = chosen(topology.intra_group, wished.intra_group, own, inside=True)
    with (
        raise_on_all_ranks(topology.world, "choosing a transport"),
        located(f"device_backend inter_group = {wished.inter_group!r}", "device_backend", "inter_group"),
    ):
        cross, why_cross = chosen(topology.inter_group, wished.inter_group, own, inside=False)
    cross = share_thread(group, cross)
    if own.device is not None and topology.rank == 0:
        log.info(
            "tensors on devices travel in groups by %s, across groups by %s",
            _told(group, why_group), _told(cross, why_cross),
        )  # fmt: skip
    of_rank = {"local_rank": own.local_rank, "device": own.device or HOST}
    return replace(topology, intra_group=group, inter_group=cross, **of_rank)


def _told(ranks: Communicator, passed_over: str) -> str:
    return f"{ranks.device_backend} (not by {passed_over})" if passed_over else ranks.device_backend
