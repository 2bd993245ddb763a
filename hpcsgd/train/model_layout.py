"""Changes to a model before training: dtype, memory format, compiled and recomputed regions.

All changes are made in place. Parameters keep their names, so that a saved model fits the plain module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hpcsgd.config.schema import TrainingSection
from hpcsgd.engine.precision import Precision
from hpcsgd.errors import UserError
from hpcsgd.models.regions import regions
from hpcsgd.train.recomputing import recompute

IMAGES = 4
"""Dimensions of a batch of images, and of the weights of a convolution over them."""


def lay_out(model: nn.Module, training: TrainingSection, precision: Precision) -> None:
    """Set dtype, memory format and activation checkpointing of `model` by `training` and `precision`.

    Raises `UserError` if the model has no layers to which a setting applies.
    """
    if precision.master is not None:
        assert precision.computes is not None
        narrow(model, precision.computes)
    if training.channels_last:
        channels_last(model)
    if training.activation_checkpointing:
        found = list(regions(model))
        if not found:
            raise UserError(
                "[training] activation_checkpointing: the model has no blocks, modules made of others",
                key=("training", "activation_checkpointing"),
            )
        recompute(found)


def narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters and inputs to `dtype`.

    Modules with float buffers (batch norm) keep their dtype, because their running statistics add up small
    changes.
    """
    for module in model.modules():
        if not any(buffer.is_floating_point() for buffer in module.buffers(recurse=False)):
            for param in module.parameters(recurse=False):
                if param.is_floating_point():
                    param.data = param.data.to(dtype)
    _on_inputs(model, lambda x: x.to(dtype) if x.is_floating_point() else x)


def channels_last(model: nn.Module) -> None:
    """Store the channels of a pixel next to each other, in images and in the weights of convolutions."""
    if not any(param.dim() == IMAGES for param in model.parameters()):
        raise UserError(
            "[training] channels_last: the model has no convolution over images",
            key=("training", "channels_last"),
        )
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - torch has no type for it

    def laid_out(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if x.dim() == IMAGES else x

    _on_inputs(model, laid_out)


def compile_regions(model: nn.Module, **options: Any) -> None:
    """Compile each region by itself, by `torch.compile` with these options, when it first runs.

    A compiled backward pass yields all its gradients at its end. If the whole model were one region, no
    computation would be left to hide the messages. Regions finish one after the other.
    """
    for region in list(regions(model)) or [model]:
        region.compile(**options)


def _on_inputs(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    def changed(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(change(x) if isinstance(x, Tensor) else x for x in args)

    model.register_forward_pre_hook(changed)
