"""Who samples are dealt to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class _World(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


class Placement(Protocol):
    """Of P groups of K, group g and in it position j: what samplers need to know of a job."""

    @property
    def world(self) -> _World: ...
    @property
    def P(self) -> int: ...
    @property
    def K(self) -> int: ...
    @property
    def g(self) -> int: ...
    @property
    def j(self) -> int: ...


@dataclass(frozen=True)
class AsRank:
    """One of `size` that samples are dealt to, K of them a group, where that is no rank of a job: a virtual
    rank, an island."""

    rank: int
    size: int
    K: int = 1

    @property
    def world(self) -> AsRank:
        return self

    @property
    def P(self) -> int:
        return self.size // self.K

    @property
    def g(self) -> int:
        return self.rank // self.K

    @property
    def j(self) -> int:
        return self.rank % self.K
