"""Several optimizers as one, each for some of the parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, optim

from hpcsgd.arguments import checked
from hpcsgd.errors import UserError


@checked
@final
class ChainedOptimizer(optim.Optimizer):
    """One optimizer made of several, each with parameters of its own.

    It has one state and one list of parameter groups: those of all parts, in order, each with the options of
    its own part. Learning-rate schedulers, `state_dict()` and gradient scalers see one optimizer.

    Args:
        parts: One or more torch optimizers. No parameter may be in two of them.

    Raises:
        UserError: If there are no parts, a part cannot be chained, or two parts share a parameter.

    Example:
        >>> matrices = [p for p in model.parameters() if p.ndim == 2]
        >>> others = [p for p in model.parameters() if p.ndim != 2]
        >>> matrices_by, others_by = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.001)
        >>> inner = hpcsgd.ChainedOptimizer(matrices_by, others_by)
        >>> optimizer = hpcsgd.DistributedOptimizer(inner, model, topology, hpcsgd.hierarchical(sync_every=8))
        >>> train(optimizer, steps=2)
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.02, 0.001]
    """

    def __init__(self, *parts: optim.Optimizer) -> None:
        _require_joinable(parts)
        self.parts = parts
        self._sizes = [len(part.param_groups) for part in parts]
        self._complete = False
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._complete = True
        self.state = defaultdict[Tensor, Any](dict)
        for part in parts:
            self.state.update(part.state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run `closure`, if any, and one step of each part; return the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse any `param_group`, because it would be unknown to which part it belongs."""
        if self._complete:
            raise UserError("add_param_group of joined optimizers: add it to one of them before")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        ours = {name: vars(self)[name] for name in ("parts", "_sizes", "_complete")}
        return {**super().__getstate__(), **ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Make the parts use the state and parameter groups of this optimizer."""
        groups = iter(self.param_groups)
        for part, size in zip(self.parts, self._sizes, strict=True):
            part.__setstate__({"state": self.state, "param_groups": [next(groups) for _ in range(size)]})


def parts_of(optimizer: optim.Optimizer) -> tuple[optim.Optimizer, ...]:
    """Return the parts of a chained optimizer, or `optimizer` itself."""
    return optimizer.parts if isinstance(optimizer, ChainedOptimizer) else (optimizer,)


def kind_of(optimizer: optim.Optimizer) -> str:
    """Return the class names of the optimizer's parts, for messages."""
    return " and ".join(type(part).__name__ for part in parts_of(optimizer))


def _require_joinable(parts: tuple[optim.Optimizer, ...]) -> None:
    if not parts:
        raise UserError("ChainedOptimizer(): needs one optimizer or more")
    for part in parts:
        if not isinstance(part, optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(f"ChainedOptimizer: {type(part).__name__} is no torch optimizer")
        if isinstance(part, ChainedOptimizer):
            raise UserError("ChainedOptimizer: join them all at once, none of those that are joined already")
        if hasattr(part, "averaged_model"):  # a DistributedOptimizer, or what goes around one
            raise UserError(
                "ChainedOptimizer goes inside: DistributedOptimizer(ChainedOptimizer(...), model, ...)"
            )
        if isinstance(part, optim.LBFGS):
            raise UserError(
                "ChainedOptimizer: LBFGS evaluates the loss several times a step; it cannot be joined"
            )
    params = [param for part in parts for group in part.param_groups for param in group["params"]]
    if len(set(params)) < len(params):
        raise UserError("ChainedOptimizer: a parameter is in two of the optimizers")
