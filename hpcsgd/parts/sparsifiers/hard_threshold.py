"""Hard threshold: every worker sends what is at least λ in its accumulated gradient.

A. Sahu et al.: Rethinking Gradient Sparsification as Total Error Minimization, NeurIPS 2021. One comparison
an element; the number of those sent is whatever it turns out to be, and λ is to be found for each model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hpcsgd import kernels
from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator
from hpcsgd.errors import UserError
from hpcsgd.parts.sparsifiers.base import Accumulated, Share


@checked
@dataclass(frozen=True)
class HardThreshold:
    """Each worker selects what is at least λ in its accumulated gradient, however much that is.

    One comparison an element. NaN counts as larger.

    Not to be confused with `SIDCo`, which looks for the threshold that gives a density.

    Args:
        threshold: λ > 0, in the gradient's own unit; to be found for each model, and no λ stays right while
            gradients change.

    Raises:
        UserError: for a threshold that is not > 0.

    Example:
        >>> exchange = hpcsgd.Sparse(hpcsgd.HardThreshold(threshold=0.01))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.bsp(exchange))
        >>> train(optimizer, steps=1)
        >>> 0 < optimizer.metrics["density"] <= 1
        True

    Source:
        A. Sahu et al.: Rethinking Gradient Sparsification as Total Error Minimization, NeurIPS 2021.
    """

    threshold: float
    disjoint = False

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise UserError(
                f"threshold = {self.threshold}: a magnitude of gradients, > 0",
                key="threshold",
                value=self.threshold,
            )

    def cut(self, layers: Tensor, n: int) -> Tensor:
        return layers

    def share(self, x: Accumulated, t: int, workers: Communicator) -> Share:
        return Share.whole(x.acc.numel(), x.acc.numel())

    def select(self, x: Accumulated, share: Share) -> Tensor:
        return kernels.above(x.acc, self.threshold)
