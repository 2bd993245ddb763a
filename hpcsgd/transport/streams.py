"""The one door to accelerators: streams and events of CUDA, ROCm, XPU and whatever else torch knows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor


def accelerator() -> torch.device | None:
    """The kind of this machine, without an index; `None` where there is none to be used."""
    return torch.accelerator.current_accelerator(check_available=True)  # else a CUDA build says cuda anywhere


def on_accelerator(device: torch.device) -> bool:
    """Whether its tensors have streams, and memory that the host cannot touch."""
    kind = accelerator()
    return kind is not None and device.type == kind.type


class Moment:
    """What the current stream of `device` had been given when this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event = torch.Event(device)
        self._event.record(torch.accelerator.current_stream(device))

    def precede(self) -> None:
        """What the current stream is given from now on comes after it."""
        torch.accelerator.current_stream(self.device).wait_event(self._event)


def take_over(result: object) -> None:
    """Tensors that another stream asked memory for, alone or in a sequence: what is on the current one keeps
    that memory from being given away again."""
    for x in cast("Sequence[object]", result) if isinstance(result, (list, tuple)) else [result]:
        if isinstance(x, Tensor) and on_accelerator(x.device):
            x.record_stream(torch.accelerator.current_stream(x.device))


class Streams:
    """One of its owner's own for each device, made when it is first used."""

    def __init__(self) -> None:
        self._made: dict[torch.device, torch.Stream] = {}

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """It is the current stream of `device` in the block."""
        if device not in self._made:
            self._made[device] = torch.Stream(device)
        return self._made[device]


def settle(device: torch.device) -> None:
    """Return when the current stream has done all that it was given; the core is free meanwhile."""
    event = torch.Event(device, blocking=True)
    event.record(torch.accelerator.current_stream(device))
    event.synchronize()
