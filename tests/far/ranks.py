"""Ranks of tests, each on a device of its own, under delays that bring out what was not waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from far.device import DEVICES
from hpcsgd.transport import Transport

STREAMS = 4
"""So many of a device are used in a test at most: the default one, those of lanes, those of the test."""
SLOW = 3_000
"""Microseconds before each task of a slow stream."""
Delays = Mapping[int, int]
"""Stream → microseconds."""
PATTERNS: Mapping[str, Delays] = {
    "none": {},
    "default stream slow": {0: SLOW},
    "all others slow": dict.fromkeys(range(1, STREAMS), SLOW),
    **{f"stream {i} slow": {i: SLOW} for i in range(1, STREAMS)},
}
"""One that is slow by chance hides what comes too early on it: each has its turn."""
FOR_TRAININGS = {
    name: {stream: us // 6 for stream, us in delays.items()} for name, delays in PATTERNS.items()
}
"""The same for programs of many tasks."""


def place(world: Transport) -> torch.device:
    """This rank's own device, which is the current one from now on."""
    device = torch.device("far", world.rank % DEVICES)
    torch.accelerator.set_device_index(device.index)
    torch.ops.far.restart_streams(device.index)
    return device


def explicitly(function: Callable[..., Any], delays: Delays = PATTERNS["none"]) -> Callable[..., Any]:
    """`function(world, *args)` as `function(world, *args, device=…)`, which puts tensors there one by one."""

    def on_a_rank(world: Transport, *args: Any) -> Any:
        device = place(world)
        with slowed(device, delays):
            return on_the_host(function(world, *args, device=device))

    return on_a_rank


def by_default(function: Callable[..., Any], delays: Delays = PATTERNS["none"]) -> Callable[..., Any]:
    """`function(world, *args)` with all that it makes on the device by itself."""

    def on_a_rank(world: Transport, *args: Any) -> Any:
        device = place(world)
        with slowed(device, delays), device:
            return on_the_host(function(world, *args))

    return on_a_rank


PLACINGS = {"explicit": explicitly, "default": by_default}
"""Either hides faults of the other: what is made without a device, what is made for the host."""


def on_the_host(result: Any) -> Any:
    return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, result)


@contextlib.contextmanager
def slowed(device: torch.device, delays: Delays) -> Iterator[None]:
    """Streams of `device` take their time before each task; all is done at the end."""
    for stream, microseconds in delays.items():
        torch.ops.far.delay(device.index, stream, microseconds)
    try:
        yield
    finally:
        for stream in delays:
            torch.ops.far.delay(device.index, stream, 0)
        torch.accelerator.synchronize(device)
    assert torch.ops.far.streams(device.index) < STREAMS or not delays, "a stream without its turn"
