"""The rings of one rank: one for each chunk that it owns, made when needed, gone with the generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from hpcsgd.comm.on_host import on_host
from hpcsgd.elastic.register import Register
from hpcsgd.elastic.ring import Door, Overdue, TcpRing, connect


def chunk(x: Tensor, c: int, C: int) -> Tensor:
    """The c-th of C parts of a vector; some may be empty."""
    return x.view(-1)[x.numel() * c // C : x.numel() * (c + 1) // C]


class Rings:
    """`host`: where this rank can be reached by the others. `silence`: seconds that one has to answer."""

    def __init__(self, island: int, host: str, token: str, silence: float) -> None:
        self._island = island
        self._token, self._silence = token, silence
        self._door = Door(host, token)
        self._rings: dict[int, TcpRing] = {}

    @property
    def address(self) -> str:
        """host:port, for the register."""
        return self._door.address

    def of(self, c: int, now: Register, overdue: Overdue, given_up: Callable[[], bool]) -> TcpRing:
        """Of the owners of chunk `c` in this generation. Raises `OSError`."""
        if c not in self._rings:
            place = now.islands.index(self._island)
            owners = [member.addresses[c % member.ranks] for member in now.members]
            self._rings[c] = connect(
                self._door, now.generation, c, place, owners,
                token=self._token, silence=self._silence, overdue=overdue, given_up=given_up,
            )  # fmt: skip
        if given_up():  # what came before the ring was there did not cut it
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
        """`aside` ← the mean of chunk `c` of C over the `counting` islands. Raises `OSError`; then it is of
        no use."""
        for x, mean in zip(w, aside, strict=True):
            mine = on_host(chunk(x, c, C).to(mean.dtype)) if self._island in counting else None
            ring.mean(mine, chunk(mean, c, C), len(counting))

    def cut(self) -> None:
        """Whoever waits in a ring is to look up; from any thread."""
        for ring in list(self._rings.values()):
            ring.cut()

    def drop(self) -> None:
        """The generation is over."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()

    def close(self) -> None:
        self.drop()
        self._door.close()
