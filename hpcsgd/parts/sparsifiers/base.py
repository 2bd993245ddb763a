"""The protocol of sparsifiers: which elements of the accumulated gradients the workers send in a step."""

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
    """The gradients that a worker has not sent yet: acc, the error feedback e plus the gradient g (DEFT)."""

    acc: Tensor
    """The accumulated gradient: M elements of any float dtype."""
    bounds: Tensor
    """L + 1 int64 on the CPU: layer i is acc[bounds[i]:bounds[i+1]], as cut by the sparsifier's `cut`."""
    squared_norms: Tensor
    """L float64: the squared norm of each layer of acc."""


@dataclass(frozen=True)
class Share:
    """Ascending segments of acc, [start, stop), and how many elements to select in each; int64 on the CPU."""

    starts: Tensor
    stops: Tensor
    k: Tensor
    leader: int | None = None
    """The worker whose selection counts for all in this step; None if each worker's own selection counts."""

    @classmethod
    def whole(cls, M: int, k: int, leader: int | None = None) -> Share:
        """Return the share that selects k of all M elements."""
        start, stop, chosen = torch.tensor([[0], [M], [k]], device="cpu")
        return cls(start, stop, chosen, leader)

    def largest_of(self, acc: Tensor) -> Tensor:
        """Return the indices of the elements with the largest magnitudes in each segment."""
        return kernels.largest(acc, self.starts, self.stops, self.k)


@dataclass(frozen=True)
class Expected:
    """The numbers of elements that n workers are expected to select from M elements, on average."""

    M: int
    each: float
    """The number of elements that one worker selects."""
    joint: float
    """The number of elements that all workers select together."""
    searched: float
    """The number of elements that the worker with the most work searches."""
    allocation: float = 0.0
    """The bytes of the broadcast that assigns layers to workers."""
    by_one: bool = False
    """True if one worker selects for all."""

    @property
    def density(self) -> float:
        """The fraction that a worker selects of the elements that it searches."""
        return min(self.joint / self.M, 1.0) if self.by_one or self.searched < self.M else self.each / self.M


@runtime_checkable
class Foreseeing(Protocol):
    """A sparsifier that can predict how much it selects."""

    def expected(self, M: int, layers: Sequence[int], n: int) -> Expected:
        """Return what n workers are expected to select from M elements, in layers of the sizes `layers`."""
        ...


def everybodys(density: float, M: int, n: int) -> Expected:
    """Return the expected numbers if each of n workers selects independently from all M elements."""
    return Expected(M, each=density * M, joint=M * (1 - (1 - density) ** n), searched=M)


@runtime_checkable
class Sparsifier(Protocol):
    """Selects elements of the accumulated gradient on each of n workers. `t` counts the steps from 0."""

    @property
    def disjoint(self) -> bool:
        """True if no two workers ever select the same element."""
        ...

    def cut(self, layers: Tensor, n: int) -> Tensor:
        """Return the bounds of the layers for `Accumulated`, given `layers`, the bounds of the parameters."""
        ...

    def share(self, x: Accumulated, t: int, workers: Communicator) -> Share:
        """Return the part of acc that this worker searches. Collective over the workers."""
        ...

    def select(self, x: Accumulated, share: Share) -> Tensor:
        """Return this worker's indices into acc, int64, ascending."""
        ...


def require_density(density: float) -> None:
    """Raise `UserError` unless `density` is > 0 and ≤ 1."""
    if not 0 < density <= 1:
        raise UserError(
            f"density = {density}: the share of elements to send, > 0 and ≤ 1", key="density", value=density
        )


def wanted(density: float, M: int) -> int:
    """Return k, the number of elements to select of M."""
    return max(1, round(density * M))
