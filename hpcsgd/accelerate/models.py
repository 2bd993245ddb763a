"""Which model an optimizer trains, and which parameters of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn, optim

from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.errors import UserError


def model_of(optimizer: optim.Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """Return the one of `models`, or all of them in one module, with parameters of `optimizer`.

    Raises:
        UserError: If there is none.
    """
    wanted = {param for group in optimizer.param_groups for param in group["params"]}
    theirs = [each for each in models if wanted & set(each.parameters())]
    if not theirs:
        raise UserError(
            "prepare(): no prepared model has the parameters of the optimizer: give the model in the same "
            "call, or in an earlier one"
        )
    return theirs[0] if len(theirs) == 1 else nn.ModuleList(theirs)


def trained(optimizer: DistributedOptimizer) -> set[Tensor]:
    """Return the parameters that `optimizer` trains."""
    return {param for _, param in optimizer.trained}
