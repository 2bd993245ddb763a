"""MiCRO: each worker compares the elements of its own part with a threshold that follows the density.

D. Yoon, S. Oh: MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN
Training, HiPC 2023, arXiv:2310.00967. Of M elements, n workers are to send k = density·M in total. In step t:

    partition   the M elements are n parts, whose sizes differ by at most one element. Worker r searches part
                (t + r) mod n, so every worker searches each part once in n steps
    select      the worker selects all elements of its part with |acc| ≥ λ. If there are none, it selects the
                element t mod (size of the part)
    adapt       k' elements were selected by all workers together, and λ is multiplied by a factor:
                1.005 if k' > 1.1·k; 0.995 if k' ≤ 0.909·k; 1.00125 otherwise

Nothing is sorted, and each worker reads M/n elements once. The parts are disjoint, so that the union of the
selections does not grow with n. The factor between the bounds is larger than 1, so λ rises slowly even if the
density is right, and the mean density is some percent below the one that is set.

Differences from the authors' code:

- They start from λ = 1/(2√k), which fits only gradients of norm 1: for a norm of 10⁻⁴ the factor 0.995 would
  need 1800 steps. Here λ begins as ‖acc‖/(2√k), with the norm of worker 0's first acc, which it broadcasts.
  If this norm is 0 or not finite, only values that are not finite are selected, and the next step begins λ.
- They gather indices in buffers as long as the largest selection. Here each worker sends as many as it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hpcsgd import kernels
from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator, phase
from hpcsgd.core.state import State
from hpcsgd.parts.sparsifiers.base import Accumulated, Expected, Share, require_density, wanted

ABOVE, RISE = 1.1, 1.005
"""Above 1.1·k selected elements, λ is multiplied by 1.005."""
BELOW, FALL = 0.909, 0.995
"""Up to 0.909·k selected elements, λ is multiplied by 0.995."""
DRIFT = 1.00125
"""The factor of λ between these bounds."""


@checked
class MiCRO:
    """MiCRO: the workers divide the search into equal parts and select above a common threshold.

    Each of n workers compares M/n elements with a threshold, which needs no sorting. After each step the
    threshold changes by at most 0.5 %, so that all workers together select about k elements. Their selections
    are disjoint, and the number of sent elements does not grow with n. If the gradients change faster than
    the threshold, more or fewer elements are sent for some time, in particular in the first steps.

    Args:
        density: Approximate fraction d of the elements that is sent, > 0 and ≤ 1: k = d·M, rounded, at
            least 1. The mean over many steps is some percent lower.

    Raises:
        UserError: If `density` is outside these bounds.

    Shape:
        The first step broadcasts 8 bytes, the later ones nothing but indices and values.

    Example:
        >>> grad_reduce = hpcsgd.Sparse(hpcsgd.MiCRO(density=0.1))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.bsp(grad_reduce))
        >>> train(optimizer, steps=1)
        >>> 0 < optimizer.metrics["density"] <= 1
        True

    References:
        D. Yoon, S. Oh: MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed
        DNN Training, HiPC 2023, arXiv:2310.00967.

    See Also:
        `ExDyna`: moves the bounds of the parts, so that all workers select about as many elements.
        `Deft`: sends k elements from the first step on.
    """

    disjoint = True

    def __init__(self, density: float) -> None:
        require_density(density)
        self.density = density
        self._threshold = Threshold(density)

    def cut(self, layers: Tensor, n: int) -> Tensor:
        return layers

    def share(self, x: Accumulated, t: int, workers: Communicator) -> Share:
        self._threshold.begin(x, workers)
        M, n = x.acc.numel(), workers.size
        part = (t + workers.rank) % n
        return share_of(M * part // n, M * (part + 1) // n, t)

    def select(self, x: Accumulated, share: Share) -> Tensor:
        return self._threshold.select(x, share)

    def adapt(self, counts: Sequence[int], t: int, M: int) -> None:
        self._threshold.adapt(sum(counts), M)

    def expected(self, M: int, layers: Sequence[int], n: int) -> Expected:
        return evenly(self.density, M, n)

    def state_dict(self) -> State:
        """Return the threshold, which is the same for all workers of this group."""
        return State(mean={"threshold": self._threshold.value})

    def load_state_dict(self, state: State) -> None:
        self._threshold.value = state.mean.get("threshold", 0.0)


class Threshold:
    """The threshold λ, the same for all workers, which follows the density that is set."""

    def __init__(self, density: float) -> None:
        self.density = density
        self.value = 0.0
        """λ; 0 as long as it has not begun."""

    def begin(self, x: Accumulated, workers: Communicator) -> None:
        """Set λ by worker 0's acc, unless it has been set. Collective over the workers."""
        if self.value:
            return
        k = wanted(self.density, x.acc.numel())
        first = (x.squared_norms.sum().sqrt() / (2 * math.sqrt(k))).reshape(1).cpu()
        with phase("allocation"):
            workers.bcast(first, 0).wait()
        self.value = first.item() if math.isfinite(first.item()) else 0.0

    def select(self, x: Accumulated, share: Share) -> Tensor:
        """Return the indices of the elements in `share`, of one segment, that are not below λ."""
        start, stop = int(share.starts), int(share.stops)
        found = kernels.above(x.acc[start:stop], self.value or math.inf) + start
        if found.numel() == 0 and share.spare is not None:
            return found.new_tensor([share.spare])
        return found

    def adapt(self, selected: int, M: int) -> None:
        """Change λ after a step in which all workers together selected so many of M elements."""
        if self.value:
            ratio = selected / wanted(self.density, M)
            self.value *= RISE if ratio > ABOVE else DRIFT if ratio > BELOW else FALL


def share_of(start: int, stop: int, t: int) -> Share:
    """Return the share of step t that is the part [start, stop) alone, all of which may be selected."""
    size = stop - start
    first, last, most = torch.tensor([[start], [stop], [size]], device="cpu")
    return Share(first, last, most, spare=start + t % size if size else None)


def evenly(density: float, M: int, n: int) -> Expected:
    """Return the expected numbers if each of n workers has the same part of k selected elements.

    The union does not depend on this, but in a step all wait for the worker with the most.
    """
    k = wanted(density, M)
    return Expected(M, each=k / n, joint=k, searched=M / n)
