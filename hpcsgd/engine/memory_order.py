"""Conversions of state tensors shaped like a parameter, for any order of its elements in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpcsgd.engine.initial_state import NUMBERS


def has_every_element(name: str, value: Any, tensor: Tensor) -> bool:
    """Return whether a `value` of the state has an entry for each element of `tensor`."""
    alike = isinstance(value, Tensor) and value.shape == tensor.shape
    return alike and (tensor.dim() > 0 or name not in NUMBERS)


def like(param: Tensor, value: Tensor) -> Tensor:
    """Return an empty tensor with the shape and strides of `param` and the dtype of `value`."""
    return torch.empty_strided(param.size(), param.stride(), dtype=value.dtype, device=value.device)


def in_memory_order(value: Tensor, param: Tensor) -> Tensor:
    """Return `value`, which has the shape of `param`, as a vector in the memory order of `param`."""
    if value.stride() != param.stride():
        value = like(param, value).copy_(value)
    return value.as_strided((param.numel(),), (1,))
