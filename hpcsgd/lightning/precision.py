"""Lightning's precision plugins, changed to clip the group's gradient and to skip steps on all ranks.

Lightning clips what `optimizer.param_groups` list. That takes the whole averaged gradient of a group to every
rank. `DistributedOptimizer.clip_grad_norm_` needs the own shard alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import precision as lightning_precision
from lightning.pytorch.plugins.precision import Precision as AnyPrecision
from torch import nn, optim

from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.engine.scaling import GradScaler
from hpcsgd.errors import UserError


class _ClipsGroupGradient(AnyPrecision):
    """Clips the gradient that the update uses: the mean over the ranks of a group."""

    def clip_grad_by_norm(self, optimizer: optim.Optimizer, clip_val: float) -> None:
        _distributed(optimizer).clip_grad_norm_(float(clip_val))

    def clip_grad_by_value(self, optimizer: optim.Optimizer, clip_val: float) -> None:
        distributed = _distributed(optimizer)
        distributed.synchronize()
        params = [param for group in distributed.param_groups for param in group["params"]]
        torch.nn.utils.clip_grad_value_(params, clip_val)


@final
class Precision(_ClipsGroupGradient):
    """The precision "32-true"."""


@final
class HalfPrecision(_ClipsGroupGradient, lightning_precision.HalfPrecision):
    """The precisions "bf16-true" and "16-true"."""


@final
class DoublePrecision(_ClipsGroupGradient, lightning_precision.DoublePrecision):
    """The precision "64-true"."""


@final
class MixedPrecision(_ClipsGroupGradient, lightning_precision.MixedPrecision):
    """The precisions "bf16-mixed" and "16-mixed", the second one with an `hpcsgd.GradScaler`."""

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        for optimizer in optimizers if self.scaler is not None else []:
            _distributed(optimizer).scaled = True
        return super().connect(model, optimizers, lr_schedulers)

    def clip_gradients(self, optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        super().clip_gradients(_distributed(optimizer), *args, **kwargs)


def for_groups(plugin: AnyPrecision) -> AnyPrecision:
    """Return the plugin of this package in place of Lightning's `plugin`.

    Raises:
        UserError: If the plugin is of another kind, such as Transformer Engine's.
    """
    if type(plugin) not in _MAKERS:
        raise UserError(
            f"precision plugin {type(plugin).__name__}: HpcsgdStrategy supports the precisions 32-true, "
            "64-true, 16-true, bf16-true, 16-mixed and bf16-mixed"
        )
    return _MAKERS[type(plugin)](plugin)


def _mixed(plugin: Any) -> MixedPrecision:
    scaler = plugin.scaler
    if scaler is not None and not isinstance(scaler, GradScaler):
        scaler = GradScaler(
            plugin.device, scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(),
            scaler.get_growth_interval(), scaler.is_enabled(),
        )  # fmt: skip
    return MixedPrecision(plugin.precision, plugin.device, scaler)


_MAKERS: Mapping[type, Callable[[Any], AnyPrecision]] = {
    AnyPrecision: lambda plugin: Precision(),
    lightning_precision.HalfPrecision: lambda plugin: HalfPrecision(plugin.precision),
    lightning_precision.DoublePrecision: lambda plugin: DoublePrecision(),
    lightning_precision.MixedPrecision: _mixed,
    **dict.fromkeys((Precision, HalfPrecision, DoublePrecision, MixedPrecision), lambda plugin: plugin),
}


def _distributed(optimizer: Any) -> DistributedOptimizer:
    """Return the optimizer inside a `LightningOptimizer`, or `optimizer` itself."""
    inside: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return inside
