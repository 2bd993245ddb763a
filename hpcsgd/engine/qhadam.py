"""Quasi-hyperbolic Adam: a slow momentum that outlives many local steps, next to the new gradient.

A. Iacob et al.: MT-DAO: Multi-Timescale Distributed Adaptive Optimizers with Local Updates, 2025
(arXiv:2510.05361), in the form with one momentum, which needs no more memory than Adam. For the gradient g

    u ← β₁·u + (1 − β₁)·g
    v ← β₂·v + (1 − β₂)·g²
    x ← x − η·((1 − ν)·g + ν·u) / (√v + ε)

The influence of a gradient on u halves in ln 0.5 / ln β₁ steps: 6.6 for β₁ = 0.9, and 138 for 0.995. With β₁
= 0.9 only 3 % of the averaged momentum is left after 32 local steps, and with 0.995 85 %. The share 1 − ν of
the gradient itself lets the update follow the loss nevertheless. The update is that of J. Ma, D. Yarats:
Quasi-hyperbolic momentum and Adam for deep learning, ICLR 2019 (arXiv:1810.06801), whose ν₂ is 1 here.

Differences from the paper:

- The paper allows several momenta and recommends one.
- The paper's experiments divide by the v of the previous step, before the momentum (ADOPT).
- The gradient is not clipped here: `clip_grad_norm_` does that.
- Weight decay is AdamW's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, optim
from torch.optim.optimizer import ParamsT

from hpcsgd.arguments import checked
from hpcsgd.comm import accumulation_dtype
from hpcsgd.errors import UserError


@checked
@final
class QHAdam(optim.Optimizer):
    """Adam whose update mixes a slow momentum with the gradient, for many local steps between averages.

    Use it with a method that averages optimizer state, too, so that the momentum is that of all groups.

    Args:
        params: Parameters, or parameter groups, as of any torch optimizer.
        lr: Learning rate η. Default 0.001. A constant gradient moves a parameter by η per step, once the
            momentum has grown.
        betas: β₁ and β₂, the decays of the momentum and of the squared gradient. Default (0.995, 0.999). The
            paper uses 0.99 to 0.999 for β₁; the half-life of the momentum should exceed `sync_every`.
        nu: Share ν of the momentum in the update, from 0 to 1. Default 0.95. With 0 the momentum is not used.
        eps: ε, which is added to the root of v. Default 1e-08.
        weight_decay: Weight decay, separate from the gradient as in AdamW. Default 0.0.
        bias_correction: True: u and v are divided by 1 − βᵗ, as in Adam. With `nu=1.0` this is AdamW. Default
            False, as in the paper.

    Raises:
        UserError: If a number is out of bounds.
        RuntimeError: In `step()`, for sparse gradients.

    Shape:
        M parameters. The state has 2·M elements, as that of Adam, in the dtype of the parameters.

    Note:
        In 16 bits u and v would lose most of their changes, which are as small as 1 − β. Give
        `DistributedOptimizer` `master_dtype=torch.float32`, which keeps parameters and state in 32 bits.

    Example:
        >>> inner = hpcsgd.QHAdam(model.parameters(), lr=0.001, betas=(0.995, 0.999), nu=0.95)
        >>> method = hpcsgd.hierarchical(sync_every=32, optimizer_state=hpcsgd.AverageState)
        >>> optimizer = hpcsgd.DistributedOptimizer(inner, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> sorted(optimizer.state_dict()["state"][0])
        ['exp_avg', 'exp_avg_sq', 'step']

    References:
        A. Iacob et al., 2025, https://arxiv.org/abs/2510.05361; J. Ma, D. Yarats, ICLR 2019,
        https://arxiv.org/abs/1810.06801.

    See Also:
        `AverageState`: averages the momentum and the squared gradient with the models.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: Sequence[float] = (0.995, 0.999),
        nu: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = False,
    ) -> None:
        decays = tuple(betas)  # a job file gives a list
        options = {"lr": lr, "betas": decays, "nu": nu, "eps": eps, "weight_decay": weight_decay}
        _require_in_bounds(options)
        try:
            super().__init__(params, {**options, "bias_correction": bias_correction})
        except UserError:
            raise
        except (TypeError, ValueError) as error:
            raise UserError(f"QHAdam: params: {error}", key="params") from error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the parameter group `param_group`, as of any torch optimizer, if its numbers are in bounds."""
        super().add_param_group(param_group)
        _require_in_bounds(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run `closure`, if any, with gradients; update the parameters that have one; return the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _update(p, p.grad, self._started(p), group)
        return loss

    def _started(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of `p`, which begins with its first gradient."""
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state


def _require_in_bounds(options: Mapping[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= (value := options[name]) < math.inf:
            raise UserError(f"QHAdam: {name} = {value}: expected a number ≥ 0", key=name, value=value)
    betas, nu = options["betas"], options["nu"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(
            f"QHAdam: betas = {betas}: expected two numbers ≥ 0 and < 1", key="betas", value=betas
        )
    if not 0 <= nu <= 1:
        raise UserError(f"QHAdam: nu = {nu}: expected a number from 0 to 1", key="nu", value=nu)


def _update(p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Update `p` and its `state` by the gradient `g`; 16-bit numbers are computed in 32 bits."""
    if g.is_sparse:
        raise RuntimeError("QHAdam does not support sparse gradients")
    state["step"] += 1
    own = [_as_real(x) for x in (p, state["exp_avg"], state["exp_avg_sq"])]
    wide = accumulation_dtype(own[0].dtype)
    x, u, v = (each.to(wide) for each in own)
    _update_reals(x, _as_real(g).to(wide), u, v, float(state["step"]), group)
    for each, result in zip(own, (x, u, v), strict=True):
        if each is not result:
            each.copy_(result)


def _update_reals(x: Tensor, g: Tensor, u: Tensor, v: Tensor, t: float, group: dict[str, Any]) -> None:
    lr, nu, (beta1, beta2) = float(group["lr"]), group["nu"], group["betas"]
    corrected = group["bias_correction"]
    x.mul_(1 - lr * group["weight_decay"])
    u.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = v.sqrt()
    if corrected:
        root.div_(math.sqrt(1 - beta2**t))
    root.add_(group["eps"])
    x.addcdiv_(u, root, value=-lr * nu / (1 - beta1**t if corrected else 1.0))
    if nu < 1:
        x.addcdiv_(g, root, value=-lr * (1 - nu))


def _as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x
