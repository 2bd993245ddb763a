"""The one door to accelerators: streams and events of CUDA, ROCm, XPU and whatever else torch knows."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


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


class Streams:
    """One of its owner's own for each device, made when it is first used."""

    def __init__(self) -> None:
        self._made: dict[torch.device, torch.Stream] = {}

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """It is the current stream of `device` in the block."""
        if device not in self._made:
            self._made[device] = torch.Stream(device)
        return self._made[device]


def captured(device: torch.device) -> bool:
    """Whether what is asked of `device` now is only written down, as a CUDA graph, to be done later."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def choose_no_kernels_by_time() -> None:
    """cuDNN, else, tries convolutions out and takes the fastest, which may be another one every time."""
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def settle(device: torch.device) -> None:
    """Return when the current stream has done all that it was given; the core is free meanwhile."""
    event = torch.Event(device, blocking=True)
    event.record(torch.accelerator.current_stream(device))
    event.synchronize()
