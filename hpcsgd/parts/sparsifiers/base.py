"""The protocol of sparsifiers, which select the elements of accumulated gradients that workers send."""

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
    """The gradients that a worker has not sent yet: acc = e + g, error feedback plus the new gradient."""

    acc: Tensor
    """The accumulated gradient: M elements of any float dtype."""
    bounds: Tensor
    """The bounds of L layers: L + 1 int64 on the CPU. Layer i is acc[bounds[i]:bounds[i+1]]; see `cut`."""
    squared_norms: Tensor
    """The squared norms of the L layers of acc, float64."""


@dataclass(frozen=True)
class Share:
    """The segments of a vector in which a worker selects, and how many elements it selects in each.

    Segment i is [starts[i], stops[i]), and at most k[i] elements are selected there. The segments ascend; all
    three tensors are int64 on the CPU.
    """

    starts: Tensor
    stops: Tensor
    k: Tensor
    leader: int | None = None
    """The worker whose selection counts for all in this step; None if each worker's own selection counts."""
    spare: int | None = None
    """The index that the worker selects if the sparsifier's rule finds none; None if it then selects none."""

    @classmethod
    def whole(cls, M: int, k: int, leader: int | None = None) -> Share:
        """Return a share of one segment, all M elements, in which k are selected."""
        start, stop, chosen = torch.tensor([[0], [M], [k]], device="cpu")
        return cls(start, stop, chosen, leader)

    def largest_of(self, acc: Tensor) -> Tensor:
        """Return the indices of the k elements of `acc` with the largest magnitudes in each segment."""
        return kernels.largest(acc, self.starts, self.stops, self.k)


@dataclass(frozen=True)
class Expected:
    """How many of M elements n workers are expected to select and to search in a step."""

    M: int
    each: float
    """The number of elements that one worker selects."""
    joint: float
    """The number of elements in the union of all workers' selections."""
    searched: float
    """The number of elements that the worker with the most work searches."""
    allocation: float = 0.0
    """The bytes of the broadcast that assigns layers to workers; 0 without such a broadcast."""
    by_one: bool = False
    """True if in each step one worker selects the elements for all workers."""

    @property
    def density(self) -> float:
        """The fraction of the elements that a worker searches which it also selects."""
        return min(self.joint / self.M, 1.0) if self.by_one or self.searched < self.M else self.each / self.M


@runtime_checkable
class Foreseeing(Protocol):
    """A sparsifier that can predict how many elements it selects."""

    def expected(self, M: int, layers: Sequence[int], n: int) -> Expected:
        """Return how many of M elements n workers are expected to select; `layers` has the layers' sizes."""
        ...


def everybodys(density: float, M: int, n: int) -> Expected:
    """Return the expected numbers if each of n workers selects the fraction `density` independently."""
    return Expected(M, each=density * M, joint=M * (1 - (1 - density) ** n), searched=M)


@runtime_checkable
class Sparsifier(Protocol):
    """A rule by which each of n workers selects elements of its accumulated gradient.

    Steps t count from 0.
    """

    @property
    def disjoint(self) -> bool:
        """True if no two workers select the same element in the same step."""
        ...

    def cut(self, layers: Tensor, n: int) -> Tensor:
        """Return the bounds of the layers in which this sparsifier selects, for `n` workers.

        `layers` has the bounds of the parameters: parameter i is at [layers[i], layers[i+1]) in the
        accumulated gradient. A sparsifier may cut a large parameter into several layers.
        """
        ...

    def share(self, x: Accumulated, t: int, workers: Communicator) -> Share:
        """Return the part of its accumulated gradient in which this worker selects in step `t`.

        `x` has the accumulated gradient and its layers. The result lists segments, which are ranges of
        consecutive elements, and how many elements to select in each. Collective over the `workers`.
        """
        ...

    def select(self, x: Accumulated, share: Share) -> Tensor:
        """Return the indices of the elements that this worker selects, as int64 in ascending order.

        They are indices in `x.acc`, the accumulated gradient, and lie in the segments of its `share`.
        """
        ...


@runtime_checkable
class Adapting(Protocol):
    """A sparsifier that adapts to how many elements the workers selected."""

    def adapt(self, counts: Sequence[int], t: int, M: int) -> None:
        """Adapt after step t, in which worker j selected counts[j] of the M elements."""
        ...


def require_density(density: float) -> None:
    """Raise `UserError` unless `density` is > 0 and ≤ 1."""
    if not 0 < density <= 1:
        raise UserError(
            f"density = {density}: the share of elements to send, > 0 and ≤ 1", key="density", value=density
        )


def wanted(density: float, M: int) -> int:
    """Return k, how many of M elements to select: `density`·M, rounded, at least 1."""
    return max(1, round(density * M))
