"""Tensors in nested containers come to the host: by pinned memory, and a device is waited for once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpcsgd.transport.streams import settle


def on_host(tree: Any) -> Any:
    """`tree`, of dicts, lists and tuples, with copies of what is on devices; the rest is not copied."""
    devices: set[torch.device] = set()
    copied = _copied(tree, devices)
    for device in devices:
        settle(device)
    return copied


def _copied(tree: Any, devices: set[torch.device]) -> Any:
    if isinstance(tree, Tensor):
        return tree if tree.is_cpu else _on_its_way(tree.detach(), devices)
    if type(tree) is dict:
        return {key: _copied(value, devices) for key, value in tree.items()}  # pyright: ignore[reportUnknownVariableType]
    if type(tree) in (list, tuple):
        return type(tree)(_copied(value, devices) for value in tree)
    return tree


def _on_its_way(x: Tensor, devices: set[torch.device]) -> Tensor:
    devices.add(x.device)
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
