"""The facts that a sampler needs: the number of samples, and which of how many ranks this rank is."""

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
    """The properties of a topology that samplers use: P groups of K ranks, and which of them this rank is.

    This rank is rank `shard_index` of group `group_index`.
    """

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
    """An `Assignment` for a reader that is not a rank of the topology, such as a virtual or elastic group.

    The reader is number `rank` of `size` readers, from 0. Every `group_size` readers form a group.
    """

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
    """Return the number of samples of `data`, a dataset or the number itself.

    Raises `UserError` if `data` has no length.
    """
    if isinstance(data, int):
        return data
    if not isinstance(data, Sized):
        raise UserError(
            f"data = {shown(data)}, which has no length: expected a dataset with a length, or the length; "
            "what is read as a stream takes no sampler: give each rank a part of its own, by topology.rank"
        )
    return len(data)
