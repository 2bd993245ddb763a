"""The operations of a communicator on tensors of a given size, as functions without arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hpcsgd.comm import Backend, Communicator

Via = Communicator | Backend
"""The object that performs an operation: a communicator, or its backend, which needs no `wait()`."""
BYTES = 4  # of a float32


class Room:
    """A buffer to send and a buffer to receive. Both are written once, so that their pages are mapped."""

    def __init__(self, elements: int) -> None:
        self.sent, self.received = torch.ones(elements), torch.ones(elements)


def elements_of(nbytes: int, p: int) -> int:
    """Return the smallest multiple of `p` float32 elements that has at least `nbytes` bytes."""
    return -(-nbytes // (BYTES * p)) * p


def _alltoall(via: Via, x: Tensor, out: Tensor) -> Callable[[], Any]:
    return lambda: via.alltoall(out, x)


def _reduce_scatter(via: Via, x: Tensor, out: Tensor) -> Callable[[], Any]:
    own = out[: len(x) // via.size]
    return lambda: via.reduce_scatter(own, x, "mean")


def _allgather(via: Via, x: Tensor, out: Tensor) -> Callable[[], Any]:
    own = x[: len(x) // via.size]
    return lambda: via.allgather(out, own)


def _allgatherv(via: Via, x: Tensor, out: Tensor) -> Callable[[], Any]:
    own = x[: len(x) // via.size]
    return lambda: via.allgatherv(out, own, [len(own)] * via.size)


def _allreduce(via: Via, x: Tensor, out: Tensor) -> Callable[[], Any]:
    return lambda: via.allreduce(x, "mean")


def _bcast(via: Via, x: Tensor, out: Tensor) -> Callable[[], Any]:
    """Return a broadcast with a new root per call, because a fixed root would finish before other ranks."""
    roots = itertools.cycle(range(via.size))
    return lambda: via.bcast(x, next(roots))


def _sendrecv(via: Via, x: Tensor, out: Tensor) -> Callable[[], Any]:
    """Return an exchange of each rank with the rank size / 2 further, on another host if there are two."""
    hop = max(via.size // 2, 1)
    after, before = (via.rank + hop) % via.size, (via.rank - hop) % via.size
    return lambda: via.sendrecv({after: x}, {before: out})


OPERATIONS: Mapping[str, Callable[[Via, Tensor, Tensor], Callable[[], Any]]] = {
    "allgather": _allgather,
    "allgatherv": _allgatherv,
    "allreduce": _allreduce,
    "alltoall": _alltoall,
    "bcast": _bcast,
    "sendrecv": _sendrecv,
    "reduce_scatter": _reduce_scatter,
}


def on_comm_thread(operation: str, comm: Communicator, elements: int, room: Room) -> Callable[[], Any]:
    """Return a function that performs `operation` as training does, on the communication thread."""
    call = OPERATIONS[operation](comm, room.sent[:elements], room.received[:elements])
    return lambda: call().wait()


def bare(operation: str, comm: Communicator, elements: int, room: Room) -> Callable[[], Any]:
    """Return a function that performs `operation` by the backend's library, on the calling thread.

    No other thread may use the library in the meantime.
    """
    return OPERATIONS[operation](comm.backend, room.sent[:elements], room.received[:elements])
