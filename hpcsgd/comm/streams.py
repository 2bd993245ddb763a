"""The one door to accelerators: devices, streams, events of CUDA, ROCm, XPU and whatever else torch knows."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hpcsgd.errors import UserError

HOST = torch.device("cpu")
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
"""Where the kernel tells which driver of accelerators it has."""
TOO_OLD = "driver on your system is too old"
"""torch's own words where its CUDA needs a newer driver; it sees no GPU then."""
MORE_ROOM = (
    "less is needed with a smaller batch, 16-bit precision or activation checkpointing, in larger groups, "
    "which share the optimizer's state, and where groups shard the model"
)
OutOfMemory: type[RuntimeError] = torch.cuda.OutOfMemoryError
"""Of any kind of accelerator."""


def accelerator() -> torch.device | None:
    """The kind of this machine, without an index; `None` where there is none to be used."""
    return torch.accelerator.current_accelerator(check_available=True)  # else a CUDA build says cuda anywhere


def on_accelerator(device: torch.device) -> bool:
    """Whether its tensors have streams, and memory that the host cannot touch."""
    kind = accelerator()
    return kind is not None and device.type == kind.type


def device_for(wanted: str, number: int) -> torch.device:
    """Where the rank of that `number` on its node trains, this thread's current device from now on: of the
    devices that it sees the one of its number, from the first again where they are fewer.

    `wanted` is a kind, "cpu", or "auto": what there is. Raises `UserError` for a kind that there is not.
    """
    kind = accelerator()
    there = "cpu" if kind is None else kind.type
    if wanted == "auto" and kind is None:
        _require_no_older_driver()
    if wanted == "cpu" or (wanted == "auto" and kind is None):
        return HOST
    if wanted not in ("auto", there):
        kinds = ", ".join(dict.fromkeys(("auto", "cpu", there)))
        raise UserError(
            f"device = {wanted!r}: {none_here(wanted)}; allowed on this machine: {kinds}",
            key="device",
            value=wanted,
        )
    device = of_place(number)
    assert device is not None
    torch.accelerator.set_device_index(device.index)
    return device


def current(kind: str) -> torch.device | None:
    """Of the accelerators of that kind the one that this thread uses; `None` where there are none."""
    there = accelerator()
    if there is None or there.type != kind:
        return None
    return torch.device(kind, torch.accelerator.current_device_index())


def none_here(kind: str) -> str:
    """That torch sees no accelerator of that kind, and why where it says so."""
    why = why_none(kind)
    return f"torch sees none here ({why})" if why else "torch sees none here"


def why_none(kind: str) -> str:
    """Why torch sees no accelerator of that kind, as it says itself; "" where it does not say."""
    begin = getattr(getattr(torch, kind, None), "init", None)
    if begin is None:
        return ""
    try:
        begin()
    except (AssertionError, RuntimeError) as error:
        return str(error).strip().splitlines()[0].rstrip(".")
    return ""


def _require_no_older_driver() -> None:
    """Raise `UserError` where there are GPUs, and torch passes over them since their driver is too old."""
    if any(path.exists() for path in DRIVERS) and TOO_OLD in (why := why_none("cuda")):
        raise UserError(f"device = 'auto': {why}; device = 'cpu' trains without the GPU", key="device")


@contextmanager
def room_for(what: str) -> Generator[None, None, None]:
    """Raise `UserError` where a device has too little memory for what is asked of it inside."""
    try:
        yield
    except OutOfMemory as error:
        raise UserError(f"{what}: {too_little_memory(error)}") from error


def too_little_memory(error: BaseException) -> str:
    """What torch says first in an `OutOfMemory` (what was asked for, and what is there), and what helps."""
    return f"{'. '.join(str(error).split('. ')[:3]).rstrip('.')}; {MORE_ROOM}"


def require_current(device: torch.device) -> None:
    """Where torch's `fully_shard` puts shards, whatever is asked for. Raises `UserError`."""
    one_of_several = device.type != "cpu" and ":" in str(device)
    if one_of_several and device.index != torch.accelerator.current_device_index():
        raise UserError(
            f"device = {str(device)!r}: torch shards onto the current device, which is another: call "
            f"torch.accelerator.set_device_index({device.index}) before",
            key="device",
            value=str(device),
        )


def free_bytes(device: torch.device) -> int:
    """Of the memory of an accelerator."""
    return torch.accelerator.get_memory_info(device)[0]


def generator_state(device: torch.device) -> Tensor:
    """Where its own random numbers have come to; on the host."""
    return torch.get_device_module(device).get_rng_state(device)


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """They go on from there."""
    torch.get_device_module(device).set_rng_state(state, device)


def of_place(number: int) -> torch.device | None:
    """Of the accelerators that this process sees the one of that `number`, from the first again where they
    are fewer; `None` where there are none."""
    kind = accelerator()
    return kind and torch.device(kind.type, number % torch.accelerator.device_count())


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


class StreamEvent:
    """What the current stream of `device` had been given when this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event = torch.Event(device, blocking=True)  # who waits on the host leaves the core free
        self._event.record(torch.accelerator.current_stream(device))

    def precede(self) -> None:
        """What the current stream is given from now on comes after it."""
        torch.accelerator.current_stream(self.device).wait_event(self._event)

    def passed(self) -> bool:
        """Whether that stream has done it all."""
        return self._event.query()

    def await_it(self) -> None:
        """Return when that stream has done it all."""
        self._event.synchronize()


def take_over(result: object) -> None:
    """Tensors that another stream asked memory for, alone or in a sequence: what is on the current one keeps
    that memory from being given away again."""
    for x in cast("Sequence[object]", result) if isinstance(result, (list, tuple)) else [result]:
        if isinstance(x, Tensor) and on_accelerator(x.device):
            x.record_stream(torch.accelerator.current_stream(x.device))


class Confluence:
    """The streams of `device` that something was given on; of the host there are none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: set[torch.Stream] | None = set() if on_accelerator(device) else None

    def join(self) -> None:
        """The current stream is one of them."""
        if self._streams is not None:
            self._streams.add(torch.accelerator.current_stream(self._device))

    def precede(self) -> None:
        """What the current stream is given from now on comes after all that they have been given; they are
        forgotten."""
        if self._streams:
            here = torch.accelerator.current_stream(self._device)
            for stream in self._streams - {here}:
                here.wait_stream(stream)
            self._streams.clear()


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
    StreamEvent(device).await_it()
