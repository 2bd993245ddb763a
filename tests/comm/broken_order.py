"""Rules of order between streams, each broken on purpose, and a program of `ordering.py` that needs it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from comm.ordering import OPERATIONS
from hpcsgd.comm import comm_thread, staged, streams

precede, init = streams.StreamEvent.precede, streams.StreamEvent.__init__
"""The original functions, before any of them is replaced."""


def on_a_comm_thread() -> bool:
    return getattr(comm_thread._here, "on_a_comm_thread", False)


def patched(owner: Any, name: str, by: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, by)


def default_stream(device: torch.device) -> torch.Stream:
    kind = torch.accelerator.current_stream(device).device_type
    return torch.Stream(stream_id=0, device_index=device.index, device_type=kind)  # type: ignore[call-overload]


def of_the_default_stream(moment: streams.StreamEvent, device: torch.device) -> None:
    init(moment, device)
    if not on_a_comm_thread():
        moment._event.record(default_stream(device))


def for_the_default_stream(moment: streams.StreamEvent) -> None:
    precede(moment) if on_a_comm_thread() else default_stream(moment.device).wait_event(moment._event)


def done_too_early(
    of: comm_thread.CommThread, call: Callable[[], Any], asked: streams.StreamEvent | None
) -> Any:
    if asked is None:
        return call(), None
    with of._streams.on(asked.device):
        asked.precede()
        return reversed([streams.StreamEvent(asked.device), call()])


@contextlib.contextmanager
def one_room_for_all() -> Iterator[None]:
    """Give the same buffer to all tensors of a thread with one shape and type, even while it is in use."""
    rooms, room = threading.local(), staged._room
    with mock.patch.object(staged, "_room", lambda x: kept(rooms)(room, x)):
        yield


def kept(rooms: threading.local) -> Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]:
    made = rooms.__dict__

    def find(room: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        key = f"{tuple(x.shape)} {x.dtype}"
        if key not in made:
            made[key] = room(x)
        return made[key]

    return find


def here_alone(work: comm_thread.Work) -> Any:
    """Wait only for the communication thread of `work` itself."""
    result, done = work._future.result()
    if done is not None:
        done.precede()
    return result


def without_keeping(*arguments: Any, work: Callable[..., None] = comm_thread.Work.__init__) -> None:
    work(*arguments[:5])


MUTANTS: Mapping[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "the communication thread does not wait for the caller": (
        "allreduce",
        patched(
            streams.StreamEvent, "precede", lambda moment: None if on_a_comm_thread() else precede(moment)
        ),
    ),
    "the caller does not wait for the communication thread": (
        "allreduce",
        patched(
            streams.StreamEvent, "precede", lambda moment: precede(moment) if on_a_comm_thread() else None
        ),
    ),
    **{
        f"the host reads before the copy is down: {name}": (name, patched(staged, "settle", lambda _: None))
        for name in OPERATIONS
    },
    "pinned memory is used again too early": ("one_letter_after_the_other", one_room_for_all),
    "tensors are not kept until wait()": ("dropped", patched(comm_thread.Work, "__init__", without_keeping)),
    "what was handed over is not waited for": ("handed_over", patched(comm_thread.Work, "wait", here_alone)),
    "the result of a call stays that of the communication thread": (
        "result_let_go",
        patched(comm_thread, "take_over", lambda _: None),
    ),
    "the communication thread says that it is done before it is": (
        "run_on_the_comm_thread",
        patched(comm_thread.CommThread, "_carried_out", done_too_early),
    ),
    "the lane waits for the default stream, and not for the asker's": (
        "own_stream",
        patched(streams.StreamEvent, "__init__", of_the_default_stream),
    ),
    "the default stream waits for the lane, and not the waiter's": (
        "waited_for_elsewhere",
        patched(streams.StreamEvent, "precede", for_the_default_stream),
    ),
}
"""By what is broken: the name of the program that depends on it, and a context in which it is broken."""
