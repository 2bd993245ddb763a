"""Ranks of tests, each on a device of its own, under delays that bring out what was not waited for."""

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


def place(world: Communicator) -> torch.device:
    """This rank's own device, which is the current one from now on; of real ones there may be fewer."""
    kind = accelerator()
    assert kind is not None, "a test on devices needs the fixture far_device or any_device"
    device = torch.device(kind.type, world.rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    if is_far():
        torch.ops.far.restart_streams(device.index)
    return device


def is_far() -> bool:
    """Whether the accelerator is the test device, whose numbers are those of the host."""
    kind = accelerator()
    return kind is not None and kind.type == "far"


def tolerance(same_bits: bool = True, otherwise: float = 1e-12) -> dict[str, Any]:
    """For `assert_close` of what was computed on a device and on the host: none on the test device."""
    return {"rtol": 0, "atol": 0 if same_bits and is_far() else otherwise}


def explicitly(function: Callable[..., Any], delays: Delays = PATTERNS["none"]) -> Callable[..., Any]:
    """`function(world, *args)` as `function(world, *args, device=…)`, which puts tensors there one by one."""

    def on_a_rank(world: Communicator, *args: Any) -> Any:
        device = place(world)
        with slowed(device, delays):
            return on_the_host(function(world, *args, device=device))

    return on_a_rank


def by_default(function: Callable[..., Any], delays: Delays = PATTERNS["none"]) -> Callable[..., Any]:
    """`function(world, *args)` with all that it makes on the device by itself."""

    def on_a_rank(world: Communicator, *args: Any) -> Any:
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
    assert not delays or torch.ops.far.streams(device.index) < STREAMS, "a stream without its turn"
