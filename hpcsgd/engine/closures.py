"""The closure of a step, for an optimizer that is not known to call it once, before anything else.

The optimizer may call the closure at any weights, any number of times. Each call has the result that it would
have in one process with the batch of all ranks that share gradients: it returns the mean loss, and gradients
are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, optim

from hpcsgd import torch_private
from hpcsgd.engine.in_parts import step_without_hooks
from hpcsgd.engine.optimizer_param import OptimizerParam
from hpcsgd.errors import UserError

Versions = list[tuple[ref[Tensor], int] | None]
"""Each gradient with its version, which grows when it is changed in place."""


@dataclass(frozen=True)
class RankOperations:
    """The operations of a closure that involve all ranks which average their gradients together.

    All except `drop_gradients` are collective.
    """

    evaluate: Callable[[Callable[[], Any]], Any]
    """Returns the loss of this rank's batch at the optimizer's current weights, and averages gradients."""
    mean: Callable[[float], float]
    """Returns the mean of a number over the ranks, the same on all."""
    all_agree: Callable[[bool], bool]
    """Returns whether the argument is True on all ranks."""
    drop_gradients: Callable[[], None]


@dataclass(frozen=True)
class Evaluated:
    """A loss, with the parameters for which it was computed, and its gradients."""

    loss: Any
    parameters: Sequence[Tensor]
    gradients: Versions

    @classmethod
    def now(cls, loss: Any, held: Sequence[OptimizerParam]) -> Evaluated:
        return cls(loss, [each.tensor.detach().clone() for each in held], versions(held))

    def is_valid(self, held: Sequence[OptimizerParam]) -> bool:
        """Return whether parameters and gradients are unchanged since the loss was computed."""
        both = zip(self.parameters, held, strict=True)
        return self.has_its_gradients(held) and all(torch.equal(x, each.tensor) for x, each in both)

    def has_its_gradients(self, held: Sequence[OptimizerParam]) -> bool:
        """Return whether the gradients are unchanged since the loss was computed."""
        return unchanged(self.gradients, versions(held))


class Closure:
    """The closure that the optimizer gets in place of the user's.

    If there are no gradients before the optimizer's step, `evaluate_ahead` evaluates the closure first, as
    methods may use gradients or the loss. The optimizer's first call of the closure then returns that loss,
    unless the optimizer has changed parameters or dropped gradients since.
    """

    def __init__(
        self, closure: Callable[[], Any], ranks: RankOperations, held: Sequence[OptimizerParam]
    ) -> None:
        self._closure, self._ranks, self._held = closure, ranks, held
        self._is_ahead = False
        self._loss: Any = None
        self._ahead: Evaluated | None = None
        self.returned: Any = None
        """What the optimizer's `step()` has returned."""

    def evaluate_ahead(self) -> Any:
        """Return the loss of this rank's batch; its gradients are averaged as after a backward pass."""
        with torch.enable_grad():
            self._loss = self._closure()
        _require_loss(self._loss)
        self._is_ahead = True
        return self._loss

    def step(self, optimizer: optim.Optimizer) -> None:
        """Run the optimizer's `step()` with this closure, after its gradients have been averaged."""
        if self._is_ahead:
            self._ahead = Evaluated.now(self._loss, self._held)
        self.returned = step_without_hooks(optimizer, self)

    def __call__(self) -> Any:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if self._ranks.all_agree(ahead.is_valid(self._held)):
                return self._mean(ahead.loss)
            if ahead.has_its_gradients(self._held):
                self._ranks.drop_gradients()
        loss = self._ranks.evaluate(self._closure)
        _require_loss(loss)
        return self._mean(loss)

    def _mean(self, loss: Any) -> Any:
        if loss is None:
            return None
        mean = self._ranks.mean(float(loss.detach() if isinstance(loss, Tensor) else loss))
        return torch.full_like(loss, mean) if isinstance(loss, Tensor) else mean


def versions(held: Sequence[OptimizerParam]) -> Versions:
    """Return the gradients of the model and of the optimizer, with torch's counts of writes into them."""
    grads = [grad for each in held for grad in (each.param.grad, each.tensor.grad)]
    with torch_private.plainly():
        return [None if grad is None else (ref(grad), torch_private.version(grad)) for grad in grads]


def unchanged(before: Versions, now: Versions) -> bool:
    """Return whether no gradient was replaced, dropped or changed between two results of `versions`."""
    return len(before) == len(now) and all(
        x is y if x is None or y is None else x[0]() is y[0]() and x[1] == y[1]
        for x, y in zip(before, now, strict=True)
    )


def _require_loss(loss: Any) -> None:
    number = loss.numel() == 1 if isinstance(loss, Tensor) else isinstance(loss, int | float | None)
    if not number:
        raise UserError(
            f"the closure of step() returned a {type(loss).__name__}: the optimizer gets the mean loss of "
            "all ranks, so return the loss, a number or a tensor of one element"
        )
