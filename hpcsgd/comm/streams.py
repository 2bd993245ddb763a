"""Devices, streams and events of CUDA, ROCm, XPU and other accelerators, for all other modules."""

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
"""Files that exist if the kernel has loaded an NVIDIA or an AMD driver."""
TOO_OLD = "driver on your system is too old"
"""Part of torch's message if its CUDA needs a newer driver; torch then sees no GPU."""
MORE_ROOM = (
    "less is needed with a smaller batch, 16-bit precision or activation checkpointing, in larger groups, "
    "which share the optimizer's state, and where groups shard the model"
)
OutOfMemory: type[RuntimeError] = torch.cuda.OutOfMemoryError
"""The exception that torch raises when an accelerator of any kind runs out of memory."""


def accelerator() -> torch.device | None:
    """Return this machine's kind of accelerator, without an index; `None` if none can be used."""
    # without the check, a CUDA build returns cuda on any machine
    return torch.accelerator.current_accelerator(check_available=True)


def on_accelerator(device: torch.device) -> bool:
    """Return True if tensors on `device` have streams, and memory that the host cannot access."""
    kind = accelerator()
    return kind is not None and device.type == kind.type


def device_for(wanted: str, number: int) -> torch.device:
    """Return the device on which the rank of that `number` on its node trains, and make it current.

    It is the visible device `number`, modulo the number of visible devices. `wanted` is a kind, "cpu", or
    "auto" for whatever exists. Raises `UserError` for a kind that does not exist here.
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
    """Return this thread's current device, or None if that is not an accelerator of this `kind`."""
    there = accelerator()
    if there is None or there.type != kind:
        return None
    return torch.device(kind, torch.accelerator.current_device_index())


def none_here(kind: str) -> str:
    """Return the message that torch sees no accelerator of that kind, with torch's reason if it has one."""
    why = why_none(kind)
    return f"torch sees none here ({why})" if why else "torch sees none here"


def why_none(kind: str) -> str:
    """Return torch's reason for seeing no accelerator of that kind; "" if it gives none."""
    begin = getattr(getattr(torch, kind, None), "init", None)
    if begin is None:
        return ""
    try:
        begin()
    except (AssertionError, RuntimeError) as error:
        return str(error).strip().splitlines()[0].rstrip(".")
    return ""


def _require_no_older_driver() -> None:
    """Raise `UserError` if there are GPUs that torch ignores because their driver is too old."""
    if any(path.exists() for path in DRIVERS) and TOO_OLD in (why := why_none("cuda")):
        raise UserError(f"device = 'auto': {why}; device = 'cpu' trains without the GPU", key="device")


@contextmanager
def room_for(what: str) -> Generator[None, None, None]:
    """Raise `UserError` if a device runs out of memory inside the block."""
    try:
        yield
    except OutOfMemory as error:
        raise UserError(f"{what}: {too_little_memory(error)}") from error


def too_little_memory(error: BaseException) -> str:
    """Return the start of torch's `OutOfMemory` message (bytes requested and available), and remedies."""
    return f"{'. '.join(str(error).split('. ')[:3]).rstrip('.')}; {MORE_ROOM}"


def require_current(device: torch.device) -> None:
    """Require the current device: torch's `fully_shard` ignores any other one. Raises `UserError`."""
    one_of_several = device.type != "cpu" and ":" in str(device)
    if one_of_several and device.index != torch.accelerator.current_device_index():
        raise UserError(
            f"device = {str(device)!r}: torch shards onto the current device, which is another: call "
            f"torch.accelerator.set_device_index({device.index}) before",
            key="device",
            value=str(device),
        )


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of an accelerator's memory."""
    return torch.accelerator.get_memory_info(device)[0]


def generator_state(device: torch.device) -> Tensor:
    """Return the state of the device's random number generator, in host memory."""
    return torch.get_device_module(device).get_rng_state(device)


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Continue the device's random numbers from `state`."""
    torch.get_device_module(device).set_rng_state(state, device)


def of_place(number: int) -> torch.device | None:
    """Return the visible accelerator of that `number`, modulo their count; `None` if there are none."""
    kind = accelerator()
    return kind and torch.device(kind.type, number % torch.accelerator.device_count())


def identity(device: torch.device) -> str:
    """Return text by which ranks of a node see if they use the same device; it needs the UUID from torch."""
    return str(getattr(properties(device), "uuid", device))


def properties(device: torch.device) -> Any:
    """Return what torch knows of the device, such as `name` and `total_memory`, or `None`."""
    ask = getattr(_module(device), "get_device_properties", None)
    return None if ask is None else ask(device)


def reaches(device: torch.device, other: torch.device) -> bool | None:
    """Return True if `device` reads the memory of `other` without the host; None if torch does not know."""
    ask = getattr(_module(device), "can_device_access_peer", None)
    return None if ask is None else ask(device, other)


def all_visible() -> list[torch.device]:
    """Return the accelerators that this process sees."""
    kind = accelerator()
    return [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())] if kind else []


def _module(device: torch.device) -> object:
    return getattr(torch, device.type, None)


class StreamEvent:
    """A point in the current stream of `device`: after all work that the stream has now."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event = torch.Event(device, blocking=True)  # while the host waits, its core is free
        self._event.record(torch.accelerator.current_stream(device))

    def precede(self) -> None:
        """Order later work of the current stream after this event."""
        torch.accelerator.current_stream(self.device).wait_event(self._event)

    def passed(self) -> bool:
        """Return True if the stream has done all work before this event."""
        return self._event.query()

    def await_it(self) -> None:
        """Wait on the host until the stream has done all work before this event."""
        self._event.synchronize()


def take_over(result: object) -> None:
    """Keep the memory of `result` from reuse until the current stream has finished with it.

    `result` is a tensor, or a sequence of tensors, allocated on another stream.
    """
    for x in cast("Sequence[object]", result) if isinstance(result, (list, tuple)) else [result]:
        if isinstance(x, Tensor) and on_accelerator(x.device):
            x.record_stream(torch.accelerator.current_stream(x.device))


class Confluence:
    """A set of streams of `device`, for all of which a later operation waits; always empty on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: set[torch.Stream] | None = set() if on_accelerator(device) else None

    def join(self) -> None:
        """Add the current stream of the device to the set."""
        if self._streams is not None:
            self._streams.add(torch.accelerator.current_stream(self._device))

    def precede(self) -> None:
        """Order later work of the current stream after all work of the set's streams, and empty the set."""
        if self._streams:
            here = torch.accelerator.current_stream(self._device)
            for stream in self._streams - {here}:
                here.wait_stream(stream)
            self._streams.clear()


class Streams:
    """A separate stream for each device, made at its first use."""

    def __init__(self) -> None:
        self._made: dict[torch.device, torch.Stream] = {}

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Make the stream of this object the current stream of `device` inside the block."""
        if device not in self._made:
            self._made[device] = torch.Stream(device)
        return self._made[device]


def captured(device: torch.device) -> bool:
    """Return True if work for `device` is now recorded in a CUDA graph instead of executed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def choose_no_kernels_by_time() -> None:
    """Turn off cuDNN's benchmark: it times convolutions and may choose another algorithm in every run."""
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def settle(device: torch.device) -> None:
    """Wait until the current stream of `device` has done all its work; the host's core is free meanwhile."""
    StreamEvent(device).await_it()
