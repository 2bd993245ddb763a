"""What a sampler needs to know: how many samples there are, and who takes which of them."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hpcsgd.arguments import shown
from hpcsgd.errors import UserError


class _World(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


@runtime_checkable
class Assignment(Protocol):
    """Of P groups of K, group g and in it position j: what samplers need to know of a job."""

    @property
    def world(self) -> _World: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def group_index(self) -> int: ...
    @property
    def shard_index(self) -> int: ...


@dataclass(frozen=True)
class AsRank:
    """One of `size` that samples are dealt to, K of them a group, where that is no rank of a job: a virtual
    rank, an island."""

    rank: int
    size: int
    group_size: int = 1

    @property
    def world(self) -> AsRank:
        return self

    @property
    def num_groups(self) -> int:
        return self.size // self.group_size

    @property
    def group_index(self) -> int:
        return self.rank // self.group_size

    @property
    def shard_index(self) -> int:
        return self.rank % self.group_size


def length_of(data: object) -> int:
    """How many samples are dealt. Raises `UserError` for a sampler that does not say how many it draws."""
    if isinstance(data, int):
        return data
    if not isinstance(data, Sized):
        raise UserError(
            f"data = {shown(data)}, which has no length: expected a dataset with a length, or the length; "
            "what is read as a stream takes no sampler: give each rank a part of its own, by topology.rank"
        )
    return len(data)
