"""SIDCo: a threshold for about k elements, from exponential distributions fitted in several stages.

A. M. Abdelmoniem et al.: An Efficient Statistical-based Gradient Compression Technique for Distributed
Training Systems, MLSys 2021, with the exponential fit (SIDCo-E):

- If magnitudes are exponentially distributed with mean μ, the fraction r of them lies above −μ·ln r.
- The first stage keeps the fraction 0.25 of all elements by this formula. Each later stage fits the elements
  that the stage before kept, above its threshold. The fraction of the last stage is such that the product of
  all fractions is the density.

Every fifth step the number of stages changes by one if the achieved density, averaged over the five steps,
was outside 1 ± 0.2 times the requested one: fewer stages after too many elements, more after too few.

Differences from the paper: this direction reverses if the last change made the density worse, since another
number of stages has the opposite effect if tails are heavier than exponential. Later stages start from the
threshold of the stage before, not from the smallest element that this stage kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hpcsgd import kernels
from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator
from hpcsgd.core.state import State
from hpcsgd.errors import UserError
from hpcsgd.parts.sparsifiers.base import Accumulated, Expected, Share, everybodys, require_density

FIRST_RATIO = 0.25
"""The fraction of the elements that each stage except the last one keeps."""
STEPS_BETWEEN = 5
"""Steps after which the number of stages may change."""
TOLERANCE = 0.2
"""The relative error of the density up to which the number of stages stays."""


@checked
class SIDCo:
    """Selection above a threshold for about k elements, from fits of exponential distributions.

    Several fits follow one another, each to the elements above the threshold so far. The number of fits
    changes by at most one every five steps, if the achieved density is outside 1 ± 0.2 times the requested
    one. As with `TopK`, the selections of n workers overlap little, so that up to n·k elements are sent.

    Args:
        density: Approximate fraction d of the elements that a worker selects, > 0 and < 1.

    Raises:
        UserError: If `density` is outside these bounds.

    Example:
        >>> grad_reduce = hpcsgd.Sparse(hpcsgd.SIDCo(density=0.1))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.bsp(grad_reduce))
        >>> train(optimizer, steps=1)
        >>> 0 < optimizer.metrics["density"] <= 1
        True

    References:
        A. M. Abdelmoniem et al.: An Efficient Statistical-based Gradient Compression Technique for
        Distributed Training Systems, MLSys 2021, SIDCo-E.

    See Also:
        `HardThreshold`: the threshold is given.
    """

    disjoint = False

    def __init__(self, density: float) -> None:
        require_density(density)
        if density == 1:
            raise UserError(
                "density = 1: SIDCo has to fit a tail, so give less than 1", key="density", value=density
            )
        self.density = density
        self.most_stages = max(1, math.ceil(math.log(density) / math.log(FIRST_RATIO)))
        self.stages = 1
        self._direction = 1
        self._achieved: list[float] = []
        self._last_miss = math.inf

    def cut(self, layers: Tensor, n: int) -> Tensor:
        return layers

    def share(self, x: Accumulated, t: int, workers: Communicator) -> Share:
        return Share.whole(x.acc.numel(), x.acc.numel())

    def expected(self, M: int, layers: Sequence[int], n: int) -> Expected:
        return everybodys(self.density, M, n)

    def select(self, x: Accumulated, share: Share) -> Tensor:
        indices = kernels.above(x.acc, self.threshold(x.acc))
        self._adapt(indices.numel() / (self.density * x.acc.numel()))
        return indices

    def threshold(self, acc: Tensor) -> float:
        """Return the threshold η > 0, from `stages` fits of an exponential distribution to |`acc`|.

        If `acc` is all zeros, η is above all magnitudes. If a fit is not finite, η is such that only values
        which are not finite are selected.
        """
        magnitudes, eta = acc.abs(), 0.0
        last = self.density / FIRST_RATIO ** (self.stages - 1)
        for ratio in [FIRST_RATIO] * (self.stages - 1) + [last]:
            if magnitudes.numel() == 0:
                break
            eta -= (magnitudes.mean().item() - eta) * math.log(ratio)
            magnitudes = magnitudes[magnitudes >= eta]
        limits = torch.finfo(acc.dtype)
        return max(eta, limits.tiny) if math.isfinite(eta) else limits.max

    def state_dict(self) -> State:
        """Return the state of this worker, which differs from that of other workers."""
        found = {
            "stages": self.stages,
            "direction": self._direction,
            "achieved": self._achieved,
            "last_miss": self._last_miss,
        }
        return State(per_rank=found)

    def load_state_dict(self, state: State) -> None:
        own = state.per_rank or {"stages": 1, "direction": 1, "achieved": [], "last_miss": math.inf}
        self.stages, self._direction = own["stages"], own["direction"]
        self._achieved, self._last_miss = own["achieved"], own["last_miss"]

    def _adapt(self, achieved: float) -> None:
        self._achieved.append(achieved)
        if len(self._achieved) < STEPS_BETWEEN:
            return
        mean = sum(self._achieved) / STEPS_BETWEEN
        self._achieved.clear()
        miss = abs(mean - 1)
        if miss > TOLERANCE:
            if miss > self._last_miss:
                self._direction = -self._direction
            towards = self._direction if mean < 1 else -self._direction
            self.stages = min(max(self.stages + towards, 1), self.most_stages)
        self._last_miss = miss
