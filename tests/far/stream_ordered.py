"""A process group for the test device that behaves like NCCL.

An operation is enqueued on the current stream and returns at once. It runs when the streams of all ranks have
reached it. Gloo does the work, on the streams' threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_groups: dict[int, Any] = {}
_numbers = itertools.count()
_library = torch.library.Library("stream_ordered", "DEF")


def _operator(name: str, arguments: str, call: Callable[..., Any]) -> None:
    """Define `torch.ops.stream_ordered.<name>`, which calls `call(group, …)` on the CPU and waits for it."""
    _library.define(f"{name}({arguments}, int group) -> ()")
    _library.impl(name, lambda *a: call(_groups[a[-1]], *a[:-1]).wait() and None, "CPU")
    _library.impl(name, lambda *_: None, "Meta")


def _options(kind: Callable[[], Any], **values: object) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def _allreduce(group: Any, x: Tensor, largest: bool) -> Any:
    reduction = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    return group.allreduce([x], _options(dist.AllreduceOptions, reduceOp=reduction))


def _broadcast(group: Any, x: Tensor, root: int) -> Any:
    return group.broadcast([x], _options(dist.BroadcastOptions, rootRank=root))


def _messages(group: Any, send: list[Tensor], to: list[int], recv: list[Tensor], source: list[int]) -> Any:
    works = [group.recv([x], i, 0) for x, i in zip(recv, source, strict=True)]
    works += [group.send([x], i, 0) for x, i in zip(send, to, strict=True)]
    for work in works[:-1]:
        work.wait()
    return works[-1]


_operator("alltoall", "Tensor(a!) out, Tensor x", lambda group, out, x: group.alltoall_base(out, x, [], []))
_operator("allgather", "Tensor(a!) out, Tensor x", lambda group, out, x: group._allgather_base(out, x))
_operator(
    "reduce_scatter", "Tensor(a!) out, Tensor x", lambda group, out, x: group._reduce_scatter_base(out, x)
)
_operator("allreduce", "Tensor(a!) x, bool largest", _allreduce)
_operator("broadcast", "Tensor(a!) x, int root", _broadcast)
_operator("messages", "Tensor[] send, int[] to, Tensor(a!)[] recv, int[] source", _messages)


def end_groups() -> None:
    """End all groups, also those that were not closed, after the devices have done their work.

    Work on a stream may still need a group that has no other references.
    """
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)
    _groups.clear()


class Put:
    """An operation on a stream; `wait()` returns at once."""

    def wait(self) -> bool:
        return True


class StreamOrdered:
    """The part of torch's `ProcessGroupNCCL` that hpcsgd uses."""

    def __init__(self, store: Any, rank: int, size: int, limit: timedelta) -> None:
        self._number = next(_numbers)
        _groups[self._number] = dist.ProcessGroupGloo(store, rank, size, limit)
        self._together: tuple[list[Tensor], list[int], list[Tensor], list[int]] | None = None

    def abort(self) -> None:
        """Remove the group, which ends gloo's threads."""
        _groups.pop(self._number, None)

    def alltoall_base(self, out: Tensor, x: Tensor, *_: object) -> Put:
        return self._put("alltoall", out, x)

    def _allgather_base(self, out: Tensor, x: Tensor) -> Put:
        return self._put("allgather", out, x)

    def _reduce_scatter_base(self, out: Tensor, x: Tensor) -> Put:
        return self._put("reduce_scatter", out, x)

    def allreduce(self, xs: list[Tensor], options: Any) -> Put:
        return self._put("allreduce", xs[0], options.reduceOp == dist.ReduceOp.MAX)

    def broadcast(self, xs: list[Tensor], options: Any) -> Put:
        return self._put("broadcast", xs[0], options.rootRank)

    def send(self, xs: list[Tensor], to: int, _: int) -> Put | None:
        return self._message(([xs[0]], [to], [], []))

    def recv(self, xs: list[Tensor], source: int, _: int) -> Put | None:
        return self._message(([], [], [xs[0]], [source]))

    def _start_coalescing(self, *_: object) -> None:
        self._together = ([], [], [], [])

    def _end_coalescing(self, *_: object) -> Put:
        assert self._together is not None, "_start_coalescing() comes first"
        together, self._together = self._together, None
        return self._put("messages", *together)

    def _message(self, parts: tuple[list[Tensor], list[int], list[Tensor], list[int]]) -> Put | None:
        if self._together is None:
            return self._put("messages", *parts)
        for all_parts, part in zip(self._together, parts, strict=True):
            all_parts.extend(part)  # type: ignore[arg-type]
        return None

    def _put(self, name: str, *arguments: Any) -> Put:
        getattr(torch.ops.stream_ordered, name)(*arguments, self._number)
        return Put()
