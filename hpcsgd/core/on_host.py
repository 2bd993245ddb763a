"""Tensors in nested containers come to the host: by pinned memory, and a device is waited for once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpcsgd.transport.streams import settle


def on_host(tree: Any) -> Any:
    """`tree`, of dicts, lists and tuples, with copies of what is on devices; the rest is not copied."""
    return _arrived(tree, lambda x: x)


def taken(tree: Any) -> Any:
    """`tree` as it is now: with copies of all its tensors."""
    return _arrived(tree, lambda x: x.detach().clone())


def _arrived(tree: Any, of_host: Callable[[Tensor], Tensor]) -> Any:
    devices: set[torch.device] = set()

    def arriving(x: Tensor) -> Tensor:
        if x.is_cpu:
            return of_host(x)
        devices.add(x.device)
        return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x.detach(), non_blocking=True)

    copied = _mapped(tree, arriving)
    for device in devices:
        settle(device)
    return copied


def _mapped(tree: Any, f: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return f(tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, f) for key, value in tree.items()}  # pyright: ignore[reportUnknownVariableType]
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(value, f) for value in tree)
    return tree
