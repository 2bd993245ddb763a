"""Hard threshold: every worker sends the accumulated elements whose magnitude is at least λ.

A. Sahu et al.: Rethinking Gradient Sparsification as Total Error Minimization, NeurIPS 2021. The method needs
one comparison per element. The number of sent elements is not controlled, and λ must be found for each model.
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
    """Selection of all elements whose magnitude in the accumulated gradient is at least λ.

    It needs one comparison per element. The number of selected elements is not controlled. NaN counts as
    larger than λ.

    Args:
        threshold: The magnitude λ > 0, in the unit of the gradient. It must be found for each model, and no λ
            stays right while gradients change.

    Raises:
        UserError: If `threshold` is not > 0.

    Example:
        >>> grad_reduce = hpcsgd.Sparse(hpcsgd.HardThreshold(threshold=0.01))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.bsp(grad_reduce))
        >>> train(optimizer, steps=1)
        >>> 0 < optimizer.metrics["density"] <= 1
        True

    References:
        A. Sahu et al.: Rethinking Gradient Sparsification as Total Error Minimization, NeurIPS 2021.

    See Also:
        `SIDCo`: finds the threshold for a density.
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
