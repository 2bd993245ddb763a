"""The learning rate of P groups: scaling with P, and gradual warm-up.

The hierarchical local SGD paper, section III-C, scales the rate μ0 of a single group to μ = P·μ0 (linear
rule) or √P·μ0 (root rule), and raises it from μ0 to μ over the first epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from hpcsgd.arguments import checked
from hpcsgd.errors import UserError, near_miss

RULES: Mapping[str, Callable[[int], float]] = {
    "none": lambda P: 1.0,
    "linear": float,
    "root": math.sqrt,
}


@checked
def lr_scale(rule: str, P: int) -> float:
    """Return the factor for the learning rate of P groups: 1, P or √P times that of one group.

    Args:
        rule: "none", "linear" (P, the paper's for SGD) or "root" (√P, the paper's for Adam).
        P: Number of groups, at least 1.

    Returns:
        The factor.

    Raises:
        UserError: If the rule is unknown or P is below 1.

    Example:
        >>> 0.1 * hpcsgd.lr_scale("linear", 4)
        0.4

    References:
        S. Lee et al., IEEE Big Data 2020, section III-C.

    See Also:
        `WarmUp`: raises the rate to the scaled one.
    """
    if rule not in RULES:
        raise UserError(f"learning-rate rule {rule!r}: {near_miss(rule, RULES)}")
    if P < 1:
        raise UserError(f"P = {P}: expected a number of groups ≥ 1")
    return RULES[rule](P)


def first_factor(rule: str, P: int, steps: int) -> float:
    """Return the factor with which a warm-up of `steps` updates begins.

    It is 1 / `lr_scale(rule, P)`, so that the rate is that of one group, or 1 / `steps` for the rule "none".
    """
    return 1 / max(steps, 1) if rule == "none" else 1 / lr_scale(rule, P)


@checked
class WarmUp:
    """A learning-rate warm-up: update t = 0 … steps − 1 uses lr · (start + (1 − start) · t / steps).

    The factor applies only while `step()` runs. So `param_groups` and learning-rate schedulers see the rate
    without it, unlike with torch's `LinearLR`. `optimizer.rates` of a `DistributedOptimizer` includes it.

    Args:
        optimizer: The user's optimizer, before or after it is wrapped.
        steps: Updates until the factor is 1, at least 0. The paper warms up over five epochs.
        start: Factor of the first update, 0 to 1. With 1 / lr_scale(rule, P) the rate starts at that of one
            group.

    Raises:
        UserError: If an argument is outside these bounds.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> warm_up = hpcsgd.WarmUp(optimizer, steps=4, start=0.5)
        >>> train(optimizer, steps=2)
        >>> optimizer.param_groups[0]["lr"], round(optimizer.rates[0], 3)
        (0.1, 0.075)

    References:
        S. Lee et al., IEEE Big Data 2020, section III-C: gradual warm-up.
    """

    def __init__(self, optimizer: Optimizer, steps: int, start: float) -> None:
        if steps < 0 or not 0 <= start <= 1:
            raise UserError(
                f"warm-up of {steps} steps from {start} of the rate: needs steps ≥ 0, start in [0, 1]"
            )
        self.steps = steps
        self.start = start
        self.scale = 1.0
        """A further factor of the rate, which `LivingGroupsScaling` sets by the number of living groups."""
        self.t = 0
        self._changed: list[tuple[dict[str, Any], Any, Any]] = []  # param group, its rate, the changed one
        optimizer.register_step_pre_hook(self._apply)
        optimizer.register_step_post_hook(self._restore)
        for known in _with_wrapped(optimizer):
            _warm_ups.setdefault(known, []).append(self)

    def factor(self) -> float:
        """Return the factor for the learning rate in the next update."""
        climbed = 1.0 if self.t >= self.steps else self.t / self.steps
        return self.scale * (self.start + (1 - self.start) * climbed)

    def state_dict(self) -> dict[str, int]:
        """Return the number of updates done."""
        return {"t": self.t}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the number of updates in `state`, a result of `state_dict`."""
        self.t = state["t"]

    def pending(self) -> float:
        """Return the factor that `param_groups` do not include yet: 1 while `step()` runs."""
        return 1.0 if self._changed else self.factor()

    def _apply(self, optimizer: Optimizer, *_: object) -> None:
        self._undo()  # a step that raised an exception has left its rates behind
        for group in optimizer.param_groups:
            lr = group["lr"]
            group["lr"] = lr * self.factor()
            self._changed.append((group, lr, group["lr"]))

    def _restore(self, *_: object) -> None:
        self._undo()
        self.t += 1

    def _undo(self) -> None:
        for group, lr, changed in self._changed:
            if group["lr"] is changed:  # not if it was set since
                group["lr"] = lr
        self._changed.clear()


class LivingGroupsScaling:
    """The scaling of the rates of `warm_up` with the number of living groups, by `rule`.

    The warm-up begins at the rate of one group.
    """

    def __init__(self, warm_up: WarmUp, rule: str) -> None:
        self._warm_up, self._rule = warm_up, rule

    def follow(self, groups: int, scaled_for: int) -> None:
        """Scale for `groups` living groups; the rates in `param_groups` are those for `scaled_for`."""
        self._warm_up.scale = lr_scale(self._rule, groups) / lr_scale(self._rule, scaled_for)
        self._warm_up.start = first_factor(self._rule, groups, self._warm_up.steps)


def _with_wrapped(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield `optimizer` and the optimizers that it wraps, which share its parameter groups."""
    inner: Any = optimizer
    while isinstance(inner, Optimizer):
        yield inner
        inner = vars(inner).get("optimizer")


_warm_ups: WeakKeyDictionary[Optimizer, list[WarmUp]] = WeakKeyDictionary()


def rates_in_force(*optimizers: Optimizer) -> tuple[float, ...]:
    """Return the learning rate of each parameter group in this or the next update, with warm-up.

    `optimizers`: one optimizer and those wrapped in it, which share their parameter groups. The rate is 0 if
    a group has none.
    """
    known = (wrapped for each in optimizers for wrapped in _with_wrapped(each))
    warm_ups = dict.fromkeys(w for each in known for w in _warm_ups.get(each, ()))
    factor = math.prod(w.pending() for w in warm_ups)
    return tuple(float(group.get("lr", 0.0)) * factor for group in optimizers[0].param_groups)
