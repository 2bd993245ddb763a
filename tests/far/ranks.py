"""Ranks of tests, each on its own device, with delays that reveal missing waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hpcsgd.comm import Communicator
from hpcsgd.comm.streams import accelerator

STREAMS = 4
"""The most streams per device in a test: the default one, and those of communication threads and tests."""
SLOW = 3_000
"""The delay in microseconds before each task of a slow stream."""
Delays = Mapping[int, int]
"""The delay in microseconds before each task, by stream."""
PATTERNS: Mapping[str, Delays] = {
    "none": {},
    "default stream slow": {0: SLOW},
    "all others slow": dict.fromkeys(range(1, STREAMS), SLOW),
    **{f"stream {i} slow": {i: SLOW} for i in range(1, STREAMS)},
}
"""A slow stream hides work that comes too early on it. So the patterns slow down different streams."""
FOR_TRAININGS = {
    name: {stream: us // 6 for stream, us in delays.items()} for name, delays in PATTERNS.items()
}
"""The same patterns with shorter delays, for programs with many tasks."""


def place(world: Communicator) -> torch.device:
    """Return this rank's device and make it the current one. Ranks share real devices if there are few."""
    kind = accelerator()
    assert kind is not None, "a test on devices needs the fixture far_device or any_device"
    device = torch.device(kind.type, world.rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    if is_far():
        torch.ops.far.restart_streams(device.index)
    return device


def is_far() -> bool:
    """Return True if the accelerator is the test device, whose results equal those of the host."""
    kind = accelerator()
    return kind is not None and kind.type == "far"


def tolerance(same_bits: bool = True, otherwise: float = 1e-12) -> dict[str, Any]:
    """Return the tolerances for `assert_close` of results of a device and the host; 0 on the test device."""
    return {"rtol": 0, "atol": 0 if same_bits and is_far() else otherwise}


def explicitly(function: Callable[..., Any], delays: Delays = PATTERNS["none"]) -> Callable[..., Any]:
    """Return a function of `(world, *args)` that calls `function(world, *args, device=…)` with delays.

    `function` itself puts tensors on the device.
    """

    def on_a_rank(world: Communicator, *args: Any) -> Any:
        device = place(world)
        with slowed(device, delays):
            return on_the_host(function(world, *args, device=device))

    return on_a_rank


def by_default(function: Callable[..., Any], delays: Delays = PATTERNS["none"]) -> Callable[..., Any]:
    """Return a function that calls `function(world, *args)` with the device as torch's default device."""

    def on_a_rank(world: Communicator, *args: Any) -> Any:
        device = place(world)
        with slowed(device, delays), device:
            return on_the_host(function(world, *args))

    return on_a_rank


PLACINGS = {"explicit": explicitly, "default": by_default}
"""Tests use both, because each hides faults: by default, tensors that are made without a device; explicitly,
tensors that are made for the host."""


def on_the_host(result: Any) -> Any:
    return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, result)


@contextlib.contextmanager
def slowed(device: torch.device, delays: Delays) -> Iterator[None]:
    """Delay each task on streams of `device` in the block, and wait for all of its work at the end."""
    for stream, microseconds in delays.items():
        torch.ops.far.delay(device.index, stream, microseconds)
    try:
        yield
    finally:
        for stream in delays:
            torch.ops.far.delay(device.index, stream, 0)
        torch.accelerator.synchronize(device)
    assert not delays or torch.ops.far.streams(device.index) < STREAMS, "a stream without its turn"
