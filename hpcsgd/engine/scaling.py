"""Loss scaling for float16: if any rank's gradients overflow, no rank makes the step.

P. Micikevicius et al.: Mixed Precision Training, ICLR 2018, section 3.2. torch's `GradScaler` sees only the
gradients of one rank, whose reduction may not have finished. Ranks would scale, skip and count steps
separately, and wait for each other forever.
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
    """A replacement for `torch.amp.GradScaler`, with the same arguments and the same loop.

    `step(optimizer)`, and `unscale_(optimizer)` before clipping, are collective over all ranks. Gradients are
    checked and unscaled once they have been reduced. Then an allreduce of 4 bytes tells all ranks whether any
    rank found a gradient that is not finite. So all ranks skip the same steps and have the same scale, and
    schedules do not count skipped steps. A `NaturalGradient` can be scaled, too, but its estimates adapt
    slowly to a new scale. bfloat16 needs no scaling.

    Args:
        device: Device type of the gradients. Default 'cuda', as in torch. On a CPU give "cpu".
        init_scale: First factor of the loss. Default 65536.0.
        growth_factor: Factor by which the scale grows. Default 2.0.
        backoff_factor: Factor by which the scale shrinks after a gradient that is not finite. Default 0.5.
        growth_interval: Steps with finite gradients after which the scale grows. Default 2000.
        enabled: False: every call does the same as without a scaler. Default True.

    Raises:
        UserError: If an argument is out of bounds. In a step: if the gradient reduction keeps gradients, as
            they would have several scales; if groups are separate jobs; or with `master_dtype`.

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

    References:
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
        """Make one step of `optimizer`, unless any rank's gradients overflowed; collective.

        `args` and `kwargs` are passed to `optimizer.step`. `loss`: loss of this rank's batch before `scale`,
        for methods that use it.
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
        """Unscale as torch does, after the reduction; return flags of overflow, the same on all ranks."""
        distributed = _distributed(optimizer)
        if distributed is None:
            return unscale()
        require_scalable(distributed)
        with distributed.unscaling():
            found = unscale()
        found = found or {found_inf.device: found_inf}  # a rank may own nothing of a small model
        worst = torch.stack([flag.to(found_inf.device) for flag in found.values()]).amax()
        with phase("overflow"):
            distributed.topology.world.allreduce(worst, "max").wait()
        for flag in found.values():
            flag.copy_(worst)
        return found


def _distributed(optimizer: optim.Optimizer) -> DistributedOptimizer | None:
    """Return `optimizer`, or the one inside it, if that is a `DistributedOptimizer`."""
    if isinstance(optimizer, OuterWrapper):
        optimizer = vars(optimizer)["optimizer"]
    return optimizer if isinstance(optimizer, DistributedOptimizer) else None


def require_scalable(optimizer: DistributedOptimizer) -> None:
    """Raise `UserError` if this optimizer cannot be used with a `GradScaler`."""
    if optimizer.method.grad_reduce.traits.keeps_gradients:
        raise UserError(
            "GradScaler: the gradient reduction keeps gradients, which would have several scales: use "
            "bfloat16"
        )
    if optimizer.topology.is_elastic:
        raise UserError("GradScaler: groups that may die would each skip other steps: use bfloat16")
    if optimizer.local.has_masters:
        raise UserError(
            "GradScaler: master weights are updated by copies of gradients that it does not unscale: leave "
            "master_dtype out"
        )
