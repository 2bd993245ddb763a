"""N ranks arranged as P groups of K.

rank r = group index g · K + shard index j

intra_group  the K ranks that train one local model by data parallelism            (j = 0 … K−1)
inter_group  the P ranks with one shard index, each with that shard of its model   (g = 0 … P−1)
world        all N = P·K ranks, numbered node by node so that a group stays on one node where it fits

`inter_group` has its own communication thread, so a bucket can cross hosts while the next one is reduced in a
group. Separate jobs may average their models, too. Each sees the others only as its `replica_groups`.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from hpcsgd.comm import Communicator, PeerLost, mesh
from hpcsgd.comm.by_node import levels
from hpcsgd.comm.streams import HOST
from hpcsgd.core.replica_groups import NO_REPLICA_GROUPS, ReplicaGroups
from hpcsgd.errors import About, JobError, UserError, count_text, in_one_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Failure = tuple[str, About]


@dataclass(frozen=True)
class Topology:
    """This rank's place among P groups of K ranks; `init` makes it.

    Rank r of N = P·K has shard index j = r mod K in group g = ⌊r/K⌋. Ranks are numbered node by node.

    Args:
        world: All N ranks. It may use another library than `intra_group` and `inter_group`.
        intra_group: The K ranks that train one local model. This rank's number in it is j.
        inter_group: The P ranks with the same shard index, one of each group. This rank's number in it is g.
        num_groups: Number of groups, P.
        group_size: Ranks per group, K.
        shares_nodes: True if this rank's group spans several nodes with several ranks on each. Default False.
        replica_groups: Other jobs that average with this one. Default Absent(index=0, count=1), for none.
        local_rank: This rank's number on its node, from the launcher or counted. Default 0.
        device: The accelerator of this local rank, such as cuda:3, or the CPU if there is none. Default cpu.

    Example:
        >>> topology = hpcsgd.init(groups=2)     # mpiexec -n 4 python train.py
        >>> topology.world_size, topology.num_groups, topology.group_size
        (4, 2, 2)
        >>> topology.device
        device(type='cpu')
        >>> topology.rank == topology.group_index * topology.group_size + topology.shard_index
        True
    """

    world: Communicator
    intra_group: Communicator
    inter_group: Communicator
    num_groups: int
    group_size: int
    shares_nodes: bool = False
    replica_groups: ReplicaGroups = NO_REPLICA_GROUPS
    local_rank: int = 0
    device: torch.device = HOST

    def __repr__(self) -> str:
        """Return P × K and this rank's place."""
        groups = f"{count_text(self.num_groups, 'group')} of {self.group_size}"
        place = f"shard {self.shard_index} of group {self.group_index}"
        return f"Topology({groups}, rank {self.rank}: {place})"

    @property
    def is_elastic(self) -> bool:
        """True if other jobs average with this one."""
        return self.replica_groups is not NO_REPLICA_GROUPS

    @property
    def total_groups(self) -> int:
        """Number of groups that train together: P times the number of jobs."""
        return self.num_groups * self.replica_groups.count

    @property
    def has_one_group(self) -> bool:
        """True if there is no other group to average with."""
        return self.num_groups == 1 and not self.is_elastic

    @property
    def rank(self) -> int:
        """This rank's number in the world, 0 … N − 1."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks, N."""
        return self.world.size

    @property
    def group_index(self) -> int:
        """Index g of this rank's group, 0 … P − 1."""
        return self.inter_group.rank

    @property
    def shard_index(self) -> int:
        """This rank's number j in its group, 0 … K − 1: the rank owns shard j of every bucket."""
        return self.intra_group.rank

    def mesh(self, kind: str = "cpu") -> DeviceMesh:
        """Return torch's `DeviceMesh` of all ranks, P × K, with the dimensions "replicate" and "shard".

        FSDP takes `topology.mesh()["shard"]`. The first call is collective. It makes torch.distributed's
        default group, unless torch has one of the same ranks. `CommStats` does not count what torch sends.

        Args:
            kind: Type of the devices that tensors are on. Default "cpu".

        Raises:
            UserError: If torch has another default group, or no library for that device type.
        """
        if (made := mesh.made(self.world, self.num_groups, self.group_size, kind)) is not None:
            return made
        with self.raise_on_all_ranks("making a mesh"):
            mesh.require_possible(self.world, kind)
        return mesh.make(self.world, self.num_groups, self.group_size, kind)

    def raise_on_all_ranks(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context that raises on all ranks if its block, `what`, raises on any; collective."""
        return raise_on_all_ranks(self.world, what)


def form(world: Communicator, groups: int | None = None, group_size: int | None = None) -> Topology:
    """Return the topology of the ranks of `world`, arranged as P groups of K; collective."""
    with raise_on_all_ranks(world, "forming groups"):
        P, K = shape(world.size, groups, group_size)
    nodes = world.gather_objects(world.backend.node)
    order = sorted(range(world.size), key=lambda rank: (nodes[rank], rank))
    if order != list(range(world.size)):
        world = world.split(0, order.index(world.rank))
    g, j = divmod(world.rank, K)
    of_ranks = [nodes[rank] for rank in order]
    if (spread := groups_across_nodes(of_ranks, K)) and world.rank == 0:
        log.warning(
            "%d of %d groups span more than one node (%d ranks a group, %d nodes): their gradients cross the "
            "network at every step", len(spread), P, K, len(set(nodes)),
        )  # fmt: skip
    intra_group, inter_group = world.split(g, j), world.split(j, g).with_own_thread()
    shares_nodes = levels(of_ranks[g * K : (g + 1) * K]) is not None
    return Topology(world, intra_group, inter_group, num_groups=P, group_size=K, shares_nodes=shares_nodes)


def require_counts(groups: int | None, group_size: int | None) -> None:
    """Raise `UserError` for a count below 1."""
    for key, value in (("groups", groups), ("group_size", group_size)):
        if value is not None and value < 1:
            raise UserError(f"{key} = {value}: at least 1 is needed", key=key, value=value)


def shape(size: int, groups: int | None, group_size: int | None) -> tuple[int, int]:
    """Return (P, K) for `size` ranks, or raise `UserError` that names the numbers that do not fit."""
    require_counts(groups, group_size)
    if groups is not None and group_size is not None:
        if groups * group_size != size:
            raise UserError(
                f"groups = {groups} of group_size = {group_size} are "
                f"{count_text(groups * group_size, 'rank')}, "
                f"but the job has {size}: give one of the two, or start "
                f"{count_text(groups * group_size, 'rank')}",
                key="groups",
                value=groups,
            )
        return groups, group_size
    given, value = ("groups", groups) if groups is not None else ("group_size", group_size)
    if value is None:
        return 1, size
    if value > size:
        message = f"{given} = {value} is more than the {count_text(size, 'rank')} of the job"
        raise UserError(message, key=given, value=value)
    if size % value:
        fitting = ", ".join(str(d) for d in range(1, size + 1) if size % d == 0)
        message = (
            f"{given} = {value} does not divide the {count_text(size, 'rank')} of the job; allowed: {fitting}"
        )
        raise UserError(message, key=given, value=value)
    return (value, size // value) if given == "groups" else (size // value, value)


def groups_across_nodes(nodes: Sequence[int], K: int) -> list[int]:
    """Return the indices of groups of K ranks that span several nodes; rank r is on `nodes[r]`."""
    return [g for g in range(len(nodes) // K) if len(set(nodes[g * K : (g + 1) * K])) > 1]


@contextlib.contextmanager
def raise_on_all_ranks(world: Communicator, what: str) -> Generator[None, None, None]:
    """Raise on every rank if the block, called `what`, raised on any; collective.

    The `JobError` has the message of the first failing rank. Only that rank may have failed, for example
    because its data is missing.
    """
    error: Exception | None = None
    try:
        yield
    except PeerLost:
        raise
    except Exception as caught:  # noqa: BLE001 - raised on every rank below
        error = caught
    _require_success(world, what, error, world.gather_objects(_failure(error)))


def gather_or_raise(world: Communicator, what: str, ask: Callable[[], Answer]) -> list[Answer]:
    """Return what `ask()` returns on each rank, in rank order; raise on all ranks if it raises on any.

    Collective; sends one message per rank. `what` describes in an error message what `ask` does.
    """
    answer: Answer | None = None
    error: Exception | None = None
    try:
        answer = ask()
    except PeerLost:
        raise
    except Exception as caught:  # noqa: BLE001 - raised on every rank below
        error = caught
    reported = world.gather_objects((_failure(error), answer))
    _require_success(world, what, error, [failure for failure, _ in reported])
    return [each for _, each in reported]


def _require_success(
    world: Communicator, what: str, error: Exception | None, outcomes: Sequence[Failure | None]
) -> None:
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None]
    if not failed:
        return
    rank, (message, (file, key, value)) = failed[0]
    if len(failed) == world.size:
        raise JobError(message, key=key, value=value, file=file) from error
    where = f"rank {rank} of {world.size}, {what}"
    raise JobError(f"{where}: {message}" if file is None else f"{where}: {file}: {message}") from error


def _failure(error: Exception | None) -> Failure | None:
    """Return the message of `error` and what it is about; None without an error.

    The message of an error that is not a `UserError` includes its traceback.
    """
    if error is None:
        return None
    if isinstance(error, UserError):
        return in_one_line(error.message), error.about
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error)).rstrip()}", About()
