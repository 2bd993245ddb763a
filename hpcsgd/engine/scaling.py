"""Loss scaling for float16: a step in which any rank's gradients overflowed is a step that nobody makes.

P. Micikevicius et al.: Mixed Precision Training, ICLR 2018, section 3.2. torch's `GradScaler` looks at what
it finds on one rank, where gradients may still be on their way: ranks would scale, skip and count steps each
for itself, and wait for each other for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim

from hpcsgd import torch_private
from hpcsgd.arguments import checked
from hpcsgd.comm import phase
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.engine.wrapping import OuterWrapper
from hpcsgd.errors import UserError


@checked
class GradScaler(torch_private.Unscaling):
    """Takes the place of `torch.amp.GradScaler`: the same arguments, the same loop.

    `step(optimizer)`, and `unscale_(optimizer)` where one clips, are collective over all ranks. Gradients are
    looked at, and unscaled, once they have been exchanged; then all ranks hear whether any found one that is
    not finite: 4 bytes. So all skip the same steps, schedules of meetings do not count them, and the scale is
    the same everywhere. Around a `NaturalGradient`, too, whose estimates take a while to forget another
    scale.

    Not to be confused with torch's own, which `DistributedOptimizer` refuses: ranks would skip steps each for
    itself, and wait for each other for ever. bfloat16 needs neither.

    Args:
        device: of the gradients. Default 'cuda', torch's; on a CPU give "cpu".
        init_scale: what the loss is multiplied by at first. Default 65536.0.
        growth_factor: by what the scale grows. Default 2.0.
        backoff_factor: by what it shrinks where a gradient is not finite. Default 0.5.
        growth_interval: steps without that, after which it grows. Default 2000.
        enabled: with False everything is passed on as it is. Default True.

    Raises:
        UserError: in a step with a sparse exchange, what it keeps being of several scales, among groups that
            are jobs of their own, and with masters.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> scaler = hpcsgd.GradScaler("cpu")
        >>> x, y = data[:16]
        >>> scaled = scaler.scale(criterion(model(x), y))
        >>> scaled.backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> optimizer.t
        1

    Source:
        P. Micikevicius et al.: Mixed Precision Training, ICLR 2018, section 3.2.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not 0 < init_scale < math.inf:
            raise UserError(
                f"init_scale = {init_scale}: expected a number > 0", key="init_scale", value=init_scale
            )
        if not 1 < growth_factor < math.inf:
            raise UserError(
                f"growth_factor = {growth_factor}: expected a number > 1",
                key="growth_factor",
                value=growth_factor,
            )
        if not 0 < backoff_factor < 1:
            raise UserError(
                f"backoff_factor = {backoff_factor}: expected a number > 0 and < 1",
                key="backoff_factor",
                value=backoff_factor,
            )
        if growth_interval < 1:
            raise UserError(
                f"growth_interval = {growth_interval}: expected a number of steps ≥ 1",
                key="growth_interval",
                value=growth_interval,
            )
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def step(
        self, optimizer: optim.Optimizer, *args: Any, loss: float | Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Make one step of `optimizer`, with `args` and `kwargs` of its `step`, unless any rank's gradients
        overflowed.

        `loss`: of this rank's batch as it was before `scale`, for a method that goes by it.
        """
        distributed = _distributed(optimizer)
        if distributed is None:
            return super().step(optimizer, *args, **kwargs)
        distributed.scaled = True
        result = super().step(optimizer, *args, loss=loss, **kwargs)
        distributed.updating.start_over()
        return result

    def _unscaled(
        self, optimizer: optim.Optimizer, unscale: Callable[[], dict[torch.device, Tensor]], found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        """torch's own, between the exchange and the agreement of all ranks."""
        distributed = _distributed(optimizer)
        if distributed is None:
            return unscale()
        require_scalable(distributed)
        with distributed.unscaling():
            found = unscale()
        found = found or {found_inf.device: found_inf}  # a position may own nothing of a small model
        worst = torch.stack([flag.to(found_inf.device) for flag in found.values()]).amax()
        with phase("overflow"):
            distributed.topology.world.allreduce(worst, "max").wait()
        for flag in found.values():
            flag.copy_(worst)
        return found


def _distributed(optimizer: optim.Optimizer) -> DistributedOptimizer | None:
    """It, or the one that it is a wrapper around."""
    if isinstance(optimizer, OuterWrapper):
        optimizer = vars(optimizer)["optimizer"]
    return optimizer if isinstance(optimizer, DistributedOptimizer) else None


def require_scalable(optimizer: DistributedOptimizer) -> None:
    """Raises `UserError` where a `GradScaler` is of no use."""
    if optimizer.method.grad_reduce.traits.keeps_gradients:
        raise UserError(
            "GradScaler with an exchange that keeps gradients, which would be of several scales: use bfloat16"
        )
    if optimizer.topology.is_elastic:
        raise UserError("GradScaler among groups that may die: each would skip other steps; use bfloat16")
    if optimizer.local.has_masters:
        raise UserError("GradScaler with masters: what it unscales is not what they are updated by")
