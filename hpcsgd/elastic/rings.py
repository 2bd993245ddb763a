"""The rings of one rank: one for each shard that it owns, connected when needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpcsgd.comm.on_host import on_host
from hpcsgd.elastic.register import Register
from hpcsgd.elastic.ring import Listener, Overdue, TcpRing, connect


class Contribution(Protocol):
    """What a group adds to a mean in place of its tensors; each attempt to average calls it anew."""

    norm: float
    """The number of this group that all groups get."""
    shared: Sequence[Tensor]
    """Tensors that are the same in all groups in the mean. In the first round of a generation all groups get
    those of the first group in the mean that has missed no round."""
    late_rounds: int
    """The number of rounds that this group may miss, and still count when it is back; 0: none."""

    def __call__(self, norms: Mapping[int, float], newest: Sequence[Tensor] = ()) -> Sequence[Tensor]:
        """Return the tensors, given the `norm` of each group in the mean, by group.

        For a group that has missed rounds, `newest` are the `shared` tensors of one that has not. Only the
        shard of them that this rank averages is valid.
        """
        ...


def part_of(x: Tensor, c: int, C: int) -> Tensor:
    """Return part c of C about equal parts of the tensor `x`, as a vector; some may be empty."""
    return x.view(-1)[x.numel() * c // C : x.numel() * (c + 1) // C]


class Rings:
    """The rings of one rank in the current generation: one for each shard that the rank owns.

    `host`: the address of this node. `heartbeat_timeout`: seconds within which a neighbour has to answer.
    """

    def __init__(self, replica_group: int, host: str, token: str, heartbeat_timeout: float) -> None:
        self._replica_group = replica_group
        self._token, self._heartbeat_timeout = token, heartbeat_timeout
        self._listener = Listener(host, token)
        self._rings: dict[int, TcpRing] = {}

    @property
    def address(self) -> str:
        """The host:port at which this rank listens for neighbours, for the register."""
        return self._listener.address

    def of(self, c: int, now: Register, overdue: Overdue, given_up: Callable[[], bool]) -> TcpRing:
        """Return the ring of the owners of shard `c` in the generation of the register `now`.

        The ring is connected if it does not exist yet. Raises `OSError` if that fails.
        """
        if c not in self._rings:
            place = now.replica_groups.index(self._replica_group)
            owners = [member.addresses[c % member.ranks] for member in now.members]
            self._rings[c] = connect(
                self._listener, now.generation, c, place, owners,
                token=self._token, heartbeat_timeout=self._heartbeat_timeout, overdue=overdue,
                given_up=given_up,
            )  # fmt: skip
        if given_up():  # a change of the register could not interrupt a ring that did not exist yet
            raise ConnectionError("the generation has ended")
        return self._rings[c]

    def mean(
        self,
        w: Sequence[Tensor],
        aside: Sequence[Tensor],
        c: int,
        C: int,
        ring: TcpRing,
        counting: Sequence[int],
    ) -> None:
        """Set shard `c` of C of the tensors `aside` to the mean over groups of the same shard of `w`.

        Only the groups in `counting` contribute to the mean. Raises `OSError` if a connection breaks; `aside`
        is then invalid.
        """
        for x, mean in zip(w, aside, strict=True):
            mine = on_host(part_of(x, c, C).to(mean.dtype)) if self._replica_group in counting else None
            ring.mean(mine, part_of(mean, c, C), len(counting))

    def copies(
        self, shared: Sequence[Tensor], copies: Sequence[Tensor], c: int, C: int, ring: TcpRing, source: int
    ) -> None:
        """Set shard `c` of C of the tensors `copies` to that of the tensors `shared` of group `source`.

        Raises `OSError` if a connection breaks; `copies` is then invalid.
        """
        for x, copy in zip(shared, copies, strict=True):
            mine = on_host(part_of(x, c, C)) if self._replica_group == source else None
            ring.mean(mine, part_of(copy, c, C), 1)

    def contributed(
        self,
        contribution: Contribution,
        newest: Sequence[Tensor],
        ring: TcpRing,
        now: Register,
        counting: Sequence[int],
    ) -> Sequence[Tensor]:
        """Return what this group adds to the mean, as `contribution` makes it from the norms of all groups.

        `newest`: the shared tensors of another group, if this one has missed rounds. All ranks get the same
        norms. Raises `OSError` if a connection breaks.
        """
        members = now.replica_groups
        found = torch.empty(len(members), dtype=torch.float64, device="cpu")
        mine = torch.zeros_like(found)
        mine[members.index(self._replica_group)] = contribution.norm
        ring.mean(mine if self._replica_group in counting else None, found, 1)
        return contribution({g: found[i].item() for i, g in enumerate(members) if g in counting}, newest)

    def cut(self) -> None:
        """Interrupt threads that wait in a ring. Any thread may call this."""
        for ring in list(self._rings.values()):
            ring.cut()

    def drop(self) -> None:
        """Close all rings, because the generation is over."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()

    def close(self) -> None:
        self.drop()
        self._listener.close()
