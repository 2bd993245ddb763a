"""State tensors that are like a parameter, whatever the order of its elements in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpcsgd.engine.initial_state import NUMBERS


def has_every_element(name: str, value: Any, tensor: Tensor) -> bool:
    """Whether a value of the state has an element for each of the tensor's."""
    alike = isinstance(value, Tensor) and value.shape == tensor.shape
    return alike and (tensor.dim() > 0 or name not in NUMBERS)


def like(param: Tensor, value: Tensor) -> Tensor:
    """Room in the form of `param`, for what is like `value`."""
    return torch.empty_strided(param.size(), param.stride(), dtype=value.dtype, device=value.device)


def in_memory_order(value: Tensor, param: Tensor) -> Tensor:
    """`value`, of the shape of `param`, as a vector, its elements in the order of the memory of `param`."""
    if value.stride() != param.stride():
        value = like(param, value).copy_(value)
    return value.as_strided((param.numel(),), (1,))
