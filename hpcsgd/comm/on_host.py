"""Copies of tensors between devices and the host by pinned memory, with at most one wait per device.

The tensors may be alone or in nested containers.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor

from hpcsgd.comm.streams import HOST, StreamEvent, on_accelerator, settle


def on_host(tree: Any) -> Any:
    """Return `tree` with host copies of its device tensors (see `mapped`); the rest is not copied."""
    return _arrived(tree, lambda x: x)


def taken(tree: Any) -> Any:
    """Return `tree` with host copies of all its tensors, as they are now."""
    return _arrived(tree, lambda x: x.detach().clone())


def room_for(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty host tensor like `x`, of `dtype` if given; pinned if `x` is on a device."""
    return torch.empty_like(x, dtype=dtype, device=HOST, pin_memory=on_accelerator(x.device))


def settle_all(xs: Iterable[Tensor]) -> None:
    """Wait until the devices of `xs` have done all work of their current streams."""
    for device in {x.device for x in xs if not x.is_cpu}:
        settle(device)


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """Return host tensor `x` on `device` without waiting for the copy; the caller may discard `x`."""
    return x.pin_memory().to(device, non_blocking=True) if on_accelerator(device) else x.to(device)


class Arrivals:
    """Tensors being copied to the host together: the first access waits for all of them."""

    def __init__(self) -> None:
        self._last: dict[torch.device, StreamEvent] = {}
        self._lock = threading.Lock()

    def bring(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to copy `x` to the host; return a function that waits for the copy and returns it."""
        if x.is_cpu:
            return lambda: x
        here = _begun(x)
        self._last[x.device] = StreamEvent(x.device)

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
    """Begin a copy of `x` in pinned memory and return it."""
    return room_for(x).copy_(x.detach(), non_blocking=True)


def mapped(tree: Any, f: Callable[[Any], Any]) -> Any:
    """Return a copy of `tree` in which each leaf is replaced with `f(leaf)`.

    Lists, tuples, dicts and the containers of `collections` are entered; objects of derived classes are
    leaves.
    """
    kind: Any = cast(Any, type(tree))
    if kind is list:
        return [mapped(value, f) for value in tree]
    if kind is tuple:
        return tuple(mapped(value, f) for value in tree)
    if kind is deque:
        return deque((mapped(value, f) for value in tree), tree.maxlen)
    if kind not in (dict, OrderedDict, defaultdict, Counter):
        return f(tree)
    like = copy(tree)  # keeps the versions of modules, which torch stores as an attribute
    for key, value in tree.items():
        like[key] = mapped(value, f)
    return like


def _arrived(tree: Any, of_host: Callable[[Tensor], Tensor]) -> Any:
    on_devices: list[Tensor] = []

    def arriving(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.is_meta:
            return x
        if x.is_cpu:
            return of_host(x)
        on_devices.append(x)
        return _begun(x)

    copied = mapped(tree, arriving)
    settle_all(on_devices)
    return copied
