"""The test device `far` as torch's accelerator."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

from far import building

DEVICES = 8
TORCH = ("2.11", "2.13")
"""The versions of torch with which the device was tested. It uses parts of torch that may change."""
FOLDER = Path(__file__).parents[2] / "build" / "far"


class _State:
    loaded = on = False


def missing() -> str | None:
    """Return the reason why this machine has no test device, or None if it has one."""
    if ".".join(torch.__version__.split(".")[:2]) not in TORCH:
        return f"torch {torch.__version__}: the test device is written for {' and '.join(TORCH)}"
    return None if building.compiler() else "no g++ to compile the test device with"


def prepare() -> None:
    """Register the device with torch, still switched off.

    Call this before the first backward pass of the process, in which torch makes a thread for each device.
    """
    if _State.loaded or missing():
        return
    library = building.library(FOLDER)
    backend_registration.rename_privateuse1_backend("far")
    torch.ops.load_library(str(library))
    torch._register_device_module("far", _module())
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    _State.loaded = True


@contextlib.contextmanager
def switched_on() -> Iterator[None]:
    """Make the device this machine's accelerator, reset, without delays."""
    assert _State.loaded, "prepare() comes first"
    torch.ops.far.reset()
    _State.on = True
    try:
        yield
    finally:
        _State.on = False
        torch.ops.far.reset()
        torch.ops.far.set_device(0)


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Hide the device, as other tests find this machine."""
    _State.on = False
    try:
        yield
    finally:
        _State.on = True


def _module() -> types.ModuleType:
    """Return the module `torch.far`."""
    ops: Any = torch.ops.far
    module: Any = types.ModuleType("torch.far")
    module.is_available = lambda: _State.on
    module.is_initialized = lambda: True
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: DEVICES if _State.on else 0
    module.current_device = ops.get_device
    module.set_device = lambda device: ops.set_device(_index(device))
    module.manual_seed = lambda seed: ops.seed(ops.get_device(), seed)
    module.manual_seed_all = _seed_all
    module.get_rng_state = lambda device=None: ops.rng_state(_index(device))
    module.set_rng_state = lambda state, device=None: ops.set_rng_state(_index(device), state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def _seed_all(seed: int) -> None:
    for device in range(DEVICES if _State.on else 0):
        torch.ops.far.seed(device, seed & (2**63 - 1))


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.ops.far.get_device() if index is None else index
