"""What selects: which elements of the accumulated gradients the workers send in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hpcsgd import kernels
from hpcsgd.comm import Communicator
from hpcsgd.errors import UserError


@dataclass(frozen=True)
class Accumulated:
    """What a worker has gathered and not sent yet: acc = e + g in DEFT's algorithm 1."""

    acc: Tensor
    """(M,), of any float dtype."""
    bounds: Tensor
    """(L + 1,), int64 on the CPU: layer i is [bounds[i], bounds[i+1]), as the sparsifier had them cut."""
    squared_norms: Tensor
    """(L,), float64: of each layer of acc."""


@dataclass(frozen=True)
class Share:
    """Segments of acc, ascending, and how many elements to select in each; int64 on the CPU."""

    starts: Tensor
    stops: Tensor
    k: Tensor
    leader: int | None = None
    """The worker whose selection counts for all, in this step; None where everybody's does."""

    @classmethod
    def whole(cls, M: int, k: int, leader: int | None = None) -> Share:
        """k of all M."""
        start, stop, chosen = torch.tensor([[0], [M], [k]], device="cpu")
        return cls(start, stop, chosen, leader)

    def largest_of(self, acc: Tensor) -> Tensor:
        """Indices of its elements of largest magnitude."""
        return kernels.largest(acc, self.starts, self.stops, self.k)


@dataclass(frozen=True)
class Expected:
    """What n workers are about to select of M elements, on the mean."""

    M: int
    each: float
    """Elements that a worker selects."""
    joint: float
    """That all of them do together."""
    searched: float
    """That the worker looks through who has most to do."""
    allocation: float = 0.0
    """Bytes of the broadcast that says who searches what."""
    by_one: bool = False
    """Whether one worker selects for all."""

    @property
    def density(self) -> float:
        """Of what a worker selects, among the elements it has to do with."""
        return min(self.joint / self.M, 1.0) if self.by_one or self.searched < self.M else self.each / self.M


@runtime_checkable
class Foreseeing(Protocol):
    """A sparsifier that knows beforehand how much it selects."""

    def expected(self, M: int, layers: Sequence[int], n: int) -> Expected:
        """Of parameters of so many elements each, `layers`."""
        ...


def everybodys(density: float, M: int, n: int) -> Expected:
    """Each of n workers selects a share of all M by itself, independently of the others."""
    return Expected(M, each=density * M, joint=M * (1 - (1 - density) ** n), searched=M)


@runtime_checkable
class Sparsifier(Protocol):
    """Selects on each of n workers. `t` counts the steps, from 0."""

    @property
    def disjoint(self) -> bool:
        """Whether no two workers ever select the same element."""
        ...

    def cut(self, layers: Tensor, n: int) -> Tensor:
        """The bounds of what norms are wanted of, from those of the parameters' own vectors."""
        ...

    def share(self, x: Accumulated, t: int, workers: Communicator) -> Share:
        """What of acc this worker searches. Collective over the workers."""
        ...

    def select(self, x: Accumulated, share: Share) -> Tensor:
        """Indices into acc, int64, ascending: this worker's."""
        ...


def require_density(density: float) -> None:
    """Raise `UserError` for what is no share of a vector."""
    if not 0 < density <= 1:
        raise UserError(
            f"density = {density}: the share of elements to send, > 0 and ≤ 1", key="density", value=density
        )


def wanted(density: float, M: int) -> int:
    """k, the number of elements to select of M."""
    return max(1, round(density * M))
