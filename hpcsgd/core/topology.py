"""N ranks as P groups of K.

rank r = group g · K + position j

group  the K ranks that share one local model by data parallelism      (j = 0 … K−1)
cross  the P ranks of one position, each holding that chunk of its model (g = 0 … P−1)
world  all N = P·K ranks, counted node by node so that a group stays on one node where it fits

Cross has a lane of its own: a bucket crosses hosts while the next one is in its group.

Jobs that live and die by themselves may average, too: each knows the others as its `replica_groups` alone.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from torch import Tensor

from hpcsgd.comm import Communicator, PeerLost, mesh
from hpcsgd.comm.by_node import levels
from hpcsgd.errors import About, JobError, UserError, count_text, in_one_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Failure = tuple[str, About]


class ReplicaGroups(Protocol):
    """Who averages with this job from outside its world: jobs of their own, each of one group. What they are
    asked is collective over the ranks of this job."""

    @property
    def index(self) -> int:
        """Of this job among them, from 0."""
        ...

    @property
    def count(self) -> int:
        """How many were started, this one included."""
        ...

    def mean(self, w: Sequence[Tensor], t: int, *, alike: bool = True) -> None:
        """Replace `w`, after `t` updates, by its mean over those that are there. `alike`: all ranks of this
        job have the same, or else each its rows."""
        ...

    def finish(self) -> None:
        """The training is complete and saved: nobody has to come any more."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


@dataclass(frozen=True)
class Absent:
    """`ReplicaGroups` that are not there: a job is built among them to see whether it can be."""

    index: int = 0
    count: int = 1

    def mean(self, w: Sequence[Tensor], t: int, *, alike: bool = True) -> None:
        raise AssertionError("nobody is there to average with")

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


NO_REPLICA_GROUPS: ReplicaGroups = Absent()
"""Those of a job that trains by itself."""


@dataclass(frozen=True)
class Topology:
    """This rank's place among P groups of K. `init` makes it.

    Rank r of N = P·K is at position j = r mod K of group g = ⌊r/K⌋, counted node by node.

    Not to be confused with a batch job of Slurm, nor with a job file: this is one rank's view of a run.

    Args:
        world: all N ranks. It, `intra_group` and `inter_group` may be of different libraries.
        intra_group: the K ranks that share one local model; its rank is j.
        inter_group: the P ranks of one position, each with that chunk of its group's model; its rank is g.
        num_groups: groups.
        group_size: ranks of a group.
        shares_nodes: whether this rank's group has several nodes, and several ranks on each. Default False.
        replica_groups: who averages with an island from outside. Default Absent(index=0, count=1): nobody.

    Example:
        >>> topology = hpcsgd.init(groups=2)     # mpiexec -n 4 python train.py
        >>> topology.world_size, topology.num_groups, topology.group_size
        (4, 2, 2)
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

    def __repr__(self) -> str:
        """P × K, and where this rank is."""
        groups = f"{count_text(self.num_groups, 'group')} of {self.group_size}"
        place = f"position {self.shard_index} of group {self.group_index}"
        return f"Topology({groups}, rank {self.rank}: {place})"

    @property
    def is_elastic(self) -> bool:
        """Whether anybody averages with it from outside its world."""
        return self.replica_groups is not NO_REPLICA_GROUPS

    @property
    def total_groups(self) -> int:
        """How many train together: P, and those of its replica groups."""
        return self.num_groups * self.replica_groups.count

    @property
    def has_one_group(self) -> bool:
        """Whether there is no group to meet."""
        return self.num_groups == 1 and not self.is_elastic

    @property
    def rank(self) -> int:
        """Of all, 0 … N − 1."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """N, how many ranks there are."""
        return self.world.size

    @property
    def group_index(self) -> int:
        """Which group this rank is in."""
        return self.inter_group.rank

    @property
    def shard_index(self) -> int:
        """Which position of its group, and so which chunk of the parameters, is this rank's."""
        return self.intra_group.rank

    def mesh(self, kind: str = "cpu") -> DeviceMesh:
        """All ranks as torch's `DeviceMesh` of P × K, its dimensions "cross" and "group", as for
        `fully_shard(model, mesh=topology.mesh()["group"])`. The first call is collective.

        torch.distributed gets its default group by it, unless it has one of the same ranks already. What
        torch sends there is in no ledger of ours.

        Args:
            kind: of devices that tensors are on. Default "cpu".

        Raises:
            UserError: where torch has another default group, or no library for that kind.
        """
        if (made := mesh.made(self.world, self.num_groups, self.group_size, kind)) is not None:
            return made
        with self.raise_on_all_ranks("making a mesh"):
            mesh.require_possible(self.world, kind)
        return mesh.make(self.world, self.num_groups, self.group_size, kind)

    def raise_on_all_ranks(self, what: str) -> contextlib.AbstractContextManager[None]:
        """For a block that may fail on one rank alone: then every rank raises a `JobError` that says `what`
        was done.
        """
        return raise_on_all_ranks(self.world, what)


def form(world: Communicator, groups: int | None = None, group_size: int | None = None) -> Topology:
    """The ranks of `world` as P groups of K; collective."""
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
    group, cross = world.split(g, j), world.split(j, g).with_own_thread()
    shares_nodes = levels(of_ranks[g * K : (g + 1) * K]) is not None
    return Topology(
        world, intra_group=group, inter_group=cross, num_groups=P, group_size=K, shares_nodes=shares_nodes
    )  # fmt: skip


def require_counts(groups: int | None, group_size: int | None) -> None:
    """Raise `UserError` for less than one."""
    for key, value in (("groups", groups), ("group_size", group_size)):
        if value is not None and value < 1:
            raise UserError(f"{key} = {value}: at least 1 is needed", key=key, value=value)


def shape(size: int, groups: int | None, group_size: int | None) -> tuple[int, int]:
    """(P, K) for `size` ranks; raises `UserError` naming the numbers that do not fit."""
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
        told = f"{given} = {value} is more than the {count_text(size, 'rank')} of the job"
        raise UserError(told, key=given, value=value)
    if size % value:
        fitting = ", ".join(str(d) for d in range(1, size + 1) if size % d == 0)
        told = (
            f"{given} = {value} does not divide the {count_text(size, 'rank')} of the job; allowed: {fitting}"
        )
        raise UserError(told, key=given, value=value)
    return (value, size // value) if given == "groups" else (size // value, value)


def groups_across_nodes(nodes: Sequence[int], K: int) -> list[int]:
    """The groups of K consecutive ranks that are on more than one node; `nodes[r]` is where rank r is."""
    return [g for g in range(len(nodes) // K) if len(set(nodes[g * K : (g + 1) * K])) > 1]


@contextlib.contextmanager
def raise_on_all_ranks(world: Communicator, what: str) -> Generator[None, None, None]:
    """Raise on every rank if the block raised on any: a `JobError` with the first failing rank's message.

    For steps where one rank alone may fail (its data is missing, its model differs); collective.
    """
    error: Exception | None = None
    try:
        yield
    except PeerLost:
        raise
    except Exception as caught:  # noqa: BLE001 - every rank hears of it below
        error = caught
    _require_success(world, what, error, world.gather_objects(_failure(error)))


def gather_or_raise(world: Communicator, what: str, ask: Callable[[], Answer]) -> list[Answer]:
    """What `ask()` returns on each rank, in rank order; raise on all. One message, collective."""
    answer: Answer | None = None
    error: Exception | None = None
    try:
        answer = ask()
    except PeerLost:
        raise
    except Exception as caught:  # noqa: BLE001 - every rank hears of it below
        error = caught
    told = world.gather_objects((_failure(error), answer))
    _require_success(world, what, error, [failure for failure, _ in told])
    return [each for _, each in told]


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
    """One line, and what it is about; a fault of ours or of the user's code is told with its traceback."""
    if error is None:
        return None
    if isinstance(error, UserError):
        return in_one_line(error.message), error.about
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error)).rstrip()}", About()
