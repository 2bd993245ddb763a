"""The guard of a mean over groups: which groups are left out, and the weights of the others.

The algorithm is in `hpcsgd.parts.averagers.guarded`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from hpcsgd.arguments import checked
from hpcsgd.errors import UserError


@checked
@dataclass(frozen=True)
class PseudoGradientPenalty:
    """Guard of a mean over groups: it leaves outliers out, and weighs the other groups by their norms.

    A group is left out of a synchronization if its change since the last one is not finite, or is much larger
    than its changes were before. Small changes are never outliers. Use it as `guard` of `hierarchical` or
    `diloco`, alone or inside `delayed` or `streaming`, or of `ensemble_sync`.

    Args:
        threshold: Standard deviations z by which a norm may exceed the mean of the group's own norms, above
            0. Default 3.0, the paper's.
        warm_up: Synchronizations before the first test, at least 2. Changes that are not finite are left out
            from the beginning. Default 20.
        smoothing: Weight a of a new norm in the moving averages, above 0 and at most 1. Default 0.02, the
            paper's.
        temperature: T, above 0: how little the norms matter. With ``float("inf")`` all groups that are not
            left out have the same weight. Default 1.0: twice the median norm has 1/e of its weight.
        max_norm: Largest norm φ of the mean change, above 0, in the unit of the parameters. Default None: no
            limit. The paper's 10 is for one module.

    Raises:
        UserError: If an argument is outside these bounds.

    Shape:
        A rank sends another 8·P bytes over the P groups and 8 in its group per synchronization; 16 in its
        group with `max_norm`. It keeps θ, the model after the last synchronization: M/K elements.

    Note:
        After a synchronization, `optimizer.metrics` has `groups_left_out`, the number of groups left out, and
        `min_weight`, the smallest weight a_g of the others. The log says which groups are left out, and which
        are back. A group that was left out continues from the common model, and with its own optimizer state
        unless `optimizer_state` is `AverageState` or `ResetState`. So a group whose momentum is not finite
        stays out with `keep_state`.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=2, guard=hpcsgd.PseudoGradientPenalty())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["groups_left_out"]
        0.0

    References:
        J. Cheng et al.: EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language
        Models, ICLR 2025 (arXiv:2412.07210), for the pseudo gradient penalty.

    See Also:
        `hierarchical`: the plain mean, if it has no `guard`.
        `ensemble_sync`: for groups that die.
    """

    threshold: float = 3.0
    warm_up: int = 20
    smoothing: float = 0.02
    temperature: float = 1.0
    max_norm: float | None = None

    def __post_init__(self) -> None:
        _require("warm_up", self.warm_up, self.warm_up >= 2, "a number of synchronizations ≥ 2")
        _require("smoothing", self.smoothing, 0 < self.smoothing <= 1, "a number > 0 and ≤ 1")
        _require("threshold", self.threshold, self.threshold > 0, "a number > 0")
        _require("temperature", self.temperature, self.temperature > 0, "a number > 0")
        _require("max_norm", self.max_norm, self.max_norm is None or self.max_norm > 0, "a norm > 0, or None")

    def weights(self, norms: Sequence[float]) -> list[float]:
        """Return the weights a_g of groups whose changes have these finite `norms`."""
        tau = self.temperature * (median(norms) or math.inf)  # if most groups did not move, all count alike
        parts = [math.exp((min(norms) - G) / tau) for G in norms]
        return [part / sum(parts) for part in parts]


GUARDS: Mapping[str, Callable[..., PseudoGradientPenalty]] = {
    "pseudo_gradient_penalty": PseudoGradientPenalty
}
"""The guards, by their names in job files."""


@dataclass(frozen=True)
class NormHistory:
    """The norms of one group's changes: their mean m, their variance σ² and their number n."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    def is_outlier(self, G: float, guard: PseudoGradientPenalty) -> bool:
        if not math.isfinite(G):
            return True
        if self.count < guard.warm_up or self.variance == 0:
            return False
        return G - self.mean > guard.threshold * math.sqrt(self.variance)

    def including(self, G: float, guard: PseudoGradientPenalty) -> NormHistory:
        if G == 0:  # no training since the last synchronization, as when another group returns
            return self
        n = self.count + 1
        r, delta = max(guard.smoothing, 1 / n), G - self.mean
        return NormHistory(self.mean + r * delta, (1 - r) * (self.variance + r * delta**2), n)


def of_groups(histories: Sequence[NormHistory], P: int) -> list[NormHistory]:
    """Return `histories` for P groups: new ones if there are none, or for another P all of them joined."""
    if len(histories) == P:
        return list(histories)
    known = [each for each in histories if each.count]
    if not known:
        return [NormHistory()] * P
    mean = fmean(each.mean for each in known)
    variance = fmean(each.variance + (each.mean - mean) ** 2 for each in known)
    return [NormHistory(mean, variance, min(each.count for each in known))] * P


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise UserError(f"{name} = {value}: expected {expected}", key=name, value=value)
