"""Cyclic local top-k: in each step, one worker selects the elements for all; the workers take turns.

C. Chen et al.: ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
Training, NeurIPS 2020. In step t worker t mod n takes the top k of its own accumulated gradient and
broadcasts the indices. There is no build-up, but the other workers wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator
from hpcsgd.parts.sparsifiers.base import Accumulated, Expected, Share, require_density, wanted


@checked
@dataclass(frozen=True)
class CLTk:
    """Selection by one worker for all: in step t, worker t mod n of the n workers selects k elements.

    These are the k elements of largest magnitude in its own accumulated gradient. Exactly k elements are
    sent. The other workers wait while that worker searches all M elements.

    Args:
        density: Fraction d of the elements that is sent, > 0 and ≤ 1: k = d·M, rounded, at least 1.

    Raises:
        UserError: If `density` is outside these bounds.

    Example:
        >>> grad_reduce = hpcsgd.Sparse(hpcsgd.CLTk(density=0.1))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.bsp(grad_reduce))
        >>> train(optimizer, steps=1)
        >>> round(optimizer.metrics["density"] * 67)     # the model has 67 parameters
        7

    References:
        C. Chen et al.: ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
        Distributed Training, NeurIPS 2020.

    See Also:
        `TopK`: every worker selects, and more than k elements are sent.
        `Deft`: every worker searches a part.
    """

    density: float
    disjoint = True

    def __post_init__(self) -> None:
        require_density(self.density)

    def cut(self, layers: Tensor, n: int) -> Tensor:
        return layers

    def share(self, x: Accumulated, t: int, workers: Communicator) -> Share:
        M, leader = x.acc.numel(), t % workers.size
        return Share.whole(M, wanted(self.density, M) if workers.rank == leader else 0, leader)

    def expected(self, M: int, layers: Sequence[int], n: int) -> Expected:
        k = wanted(self.density, M)
        return Expected(M, each=k / n, joint=k, searched=M, by_one=True)

    def select(self, x: Accumulated, share: Share) -> Tensor:
        return share.largest_of(x.acc)
