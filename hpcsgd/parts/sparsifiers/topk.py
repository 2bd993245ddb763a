"""Top-k: every worker sends the k elements of largest magnitude in its own accumulated gradient.

D. Alistarh et al.: The Convergence of Sparsified Gradient Methods, NeurIPS 2018; A. Aji, K. Heafield: Sparse
Communication for Distributed Gradient Descent, EMNLP 2017. The union of the selections of n workers grows
with n, up to n·k elements: gradient build-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator
from hpcsgd.parts.sparsifiers.base import Accumulated, Expected, Share, everybodys, require_density, wanted


@checked
@dataclass(frozen=True)
class TopK:
    """Selection of the k elements of largest magnitude in each worker's own accumulated gradient.

    The selections of n workers overlap little, so that up to n·k elements are sent. The metric `growth`
    measures this build-up. Among equal magnitudes, lower indices are selected first. NaN and infinity count
    as the largest magnitudes. Elements that are not selected are kept for later steps.

    Args:
        density: Fraction d of the elements that a worker selects, > 0 and ≤ 1: k = d·M, rounded, at least 1.
            The papers use 0.001 to 0.1.

    Raises:
        UserError: If `density` is outside these bounds.

    Example:
        >>> grad_reduce = hpcsgd.Sparse(hpcsgd.TopK(density=0.1))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.bsp(grad_reduce))
        >>> train(optimizer, steps=1)
        >>> optimizer.metrics["density"] >= 0.1
        True

    References:
        D. Alistarh et al.: The Convergence of Sparsified Gradient Methods, NeurIPS 2018; A. Aji, K. Heafield:
        Sparse Communication for Distributed Gradient Descent, EMNLP 2017.

    See Also:
        `CLTk`: one worker selects for all.
    """

    density: float
    disjoint = False

    def __post_init__(self) -> None:
        require_density(self.density)

    def cut(self, layers: Tensor, n: int) -> Tensor:
        return layers

    def share(self, x: Accumulated, t: int, workers: Communicator) -> Share:
        return Share.whole(x.acc.numel(), wanted(self.density, x.acc.numel()))

    def expected(self, M: int, layers: Sequence[int], n: int) -> Expected:
        return everybodys(self.density, M, n)

    def select(self, x: Accumulated, share: Share) -> Tensor:
        return share.largest_of(x.acc)
