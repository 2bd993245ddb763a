"""The one door to accelerators: streams and events of CUDA, ROCm, XPU and whatever else torch knows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def accelerator() -> torch.device | None:
    """The kind of this machine, without an index; `None` where there is none to be used."""
    return torch.accelerator.current_accelerator(check_available=True)  # else a CUDA build says cuda anywhere


def on_accelerator(device: torch.device) -> bool:
    """Whether its tensors have streams, and memory that the host cannot touch."""
    kind = accelerator()
    return kind is not None and device.type == kind.type


def of_place(place: int) -> torch.device | None:
    """For the rank of this number among those of its node; several have one where there are too few."""
    kind = accelerator()
    return kind and torch.device(kind.type, place % torch.accelerator.device_count())


def identity(device: torch.device) -> str:
    """The same for all ranks of a node that see this device, by whatever number, where torch tells that."""
    return str(getattr(properties(device), "uuid", device))


def properties(device: torch.device) -> Any:
    """What torch tells of it: `name`, `total_memory` and the like; `None` where it tells nothing."""
    ask = getattr(_module(device), "get_device_properties", None)
    return None if ask is None else ask(device)


def reaches(device: torch.device, other: torch.device) -> bool | None:
    """Whether one reads the memory of the other without the host; `None` where torch does not tell."""
    ask = getattr(_module(device), "can_device_access_peer", None)
    return None if ask is None else ask(device, other)


def all_visible() -> list[torch.device]:
    """The accelerators that this process sees."""
    kind = accelerator()
    return [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())] if kind else []


def _module(device: torch.device) -> object:
    return getattr(torch, device.type, None)


class Moment:
    """What the current stream of `device` had been given when this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event = torch.Event(device)
        self._event.record(torch.accelerator.current_stream(device))

    def precede(self) -> None:
        """What the current stream is given from now on comes after it."""
        torch.accelerator.current_stream(self.device).wait_event(self._event)

    def passed(self) -> bool:
        """Whether that stream has done it all."""
        return self._event.query()


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
