"""Tensors come to the host, alone or in nested containers, and back: by pinned memory, and a device is waited for
once or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpcsgd.transport.streams import Moment, on_accelerator, settle


def on_host(tree: Any) -> Any:
    """`tree`, of dicts, lists and tuples, with copies of what is on devices; the rest is not copied."""
    return _arrived(tree, lambda x: x)


def taken(tree: Any) -> Any:
    """`tree` as it is now: with copies of all its tensors."""
    return _arrived(tree, lambda x: x.detach().clone())


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` of the host there; nobody waits, and `x` may be forgotten."""
    return x.pin_memory().to(device, non_blocking=True) if on_accelerator(device) else x.to(device)


class Arrivals:
    """Tensors on their way to the host together: who asks for the first waits for all, and nobody after that."""

    def __init__(self) -> None:
        self._last: dict[torch.device, Moment] = {}
        self._lock = threading.Lock()

    def bring(self, x: Tensor) -> Callable[[], Tensor]:
        """What gives `x`, as it is now, on the host."""
        if x.is_cpu:
            return lambda: x
        here = _begun(x)
        self._last[x.device] = Moment(x.device)

        def arrived() -> Tensor:
            self._await_all()
            return here

        return arrived

    def _await_all(self) -> None:
        with self._lock:
            for moment in self._last.values():
                moment.await_it()
            self._last.clear()


def _begun(x: Tensor) -> Tensor:
    """A copy in pinned memory, under way."""
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x.detach(), non_blocking=True)


def _arrived(tree: Any, of_host: Callable[[Tensor], Tensor]) -> Any:
    devices: set[torch.device] = set()

    def arriving(x: Tensor) -> Tensor:
        if x.is_cpu:
            return of_host(x)
        devices.add(x.device)
        return _begun(x)

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
