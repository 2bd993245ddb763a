"""The rings of one rank: one for each shard that it owns, connected when needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from hpcsgd.comm.alike import Fact
from hpcsgd.comm.on_host import on_host
from hpcsgd.elastic.group_facts import require_alike
from hpcsgd.elastic.register import Register
from hpcsgd.elastic.ring import Listener, Overdue, TcpRing, connect


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
        self.facts: Sequence[Fact] = ()
        """What all groups of a generation must have been given alike."""

    @property
    def address(self) -> str:
        """The host:port at which this rank listens for neighbours, for the register."""
        return self._listener.address

    def of(self, c: int, now: Register, overdue: Overdue, given_up: Callable[[], bool]) -> TcpRing:
        """Return the ring of the owners of shard `c` in the generation of the register `now`.

        The ring is connected if it does not exist yet. Raises `OSError` if that fails, and `JobError` if this
        group has other `facts` than the others.
        """
        if is_new := c not in self._rings:
            place = now.replica_groups.index(self._replica_group)
            owners = [member.addresses[c % member.ranks] for member in now.members]
            self._rings[c] = connect(
                self._listener, now.generation, c, place, owners,
                token=self._token, heartbeat_timeout=self._heartbeat_timeout, overdue=overdue,
                given_up=given_up,
            )  # fmt: skip
        if given_up():  # a change of the register could not interrupt a ring that did not exist yet
            raise ConnectionError("the generation has ended")
        if is_new:
            require_alike(self.facts, self._replica_group, now, self._rings[c])
        return self._rings[c]

    def mean(
        self,
        w: Sequence[Tensor | None],
        aside: Sequence[Tensor],
        c: int,
        C: int,
        ring: TcpRing,
        counting: Sequence[int],
    ) -> None:
        """Set shard `c` of C of the tensors `aside` to the mean over groups of the same shard of `w`.

        Where `w` has None, nothing is averaged. Only the groups in `counting` contribute to the mean. Raises
        `OSError` if a connection breaks; `aside` is then invalid.
        """
        for x, mean in zip(w, aside, strict=True):
            if x is None:
                continue
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
