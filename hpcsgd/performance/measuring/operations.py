"""The operations of a transport at a size, each ready to be called again and again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hpcsgd.comm import Backend, Communicator

Via = Communicator | Backend
"""With a lane, or without: their operations are called alike, but those of a transport are waited for."""
BYTES = 4  # of a float32


class Room:
    """What is sent and received; written to once, so that the pages are there."""

    def __init__(self, elements: int) -> None:
        self.sent, self.received = torch.ones(elements), torch.ones(elements)


def elements_of(nbytes: int, p: int) -> int:
    """How many float32, a multiple of `p`, are `nbytes` or little more."""
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
    """From every rank in turn: one and the same would be done sending long before the last has it."""
    roots = itertools.cycle(range(via.size))
    return lambda: via.bcast(x, next(roots))


def _exchange(via: Via, x: Tensor, out: Tensor) -> Callable[[], Any]:
    """To whoever is half way round, all at once: between hosts all of it leaves."""
    hop = max(via.size // 2, 1)
    after, before = (via.rank + hop) % via.size, (via.rank - hop) % via.size
    return lambda: via.sendrecv({after: x}, {before: out})


OPERATIONS: Mapping[str, Callable[[Via, Tensor, Tensor], Callable[[], Any]]] = {
    "allgather": _allgather,
    "allgatherv": _allgatherv,
    "allreduce": _allreduce,
    "alltoall": _alltoall,
    "bcast": _bcast,
    "exchange": _exchange,
    "reduce_scatter": _reduce_scatter,
}


def on_comm_thread(operation: str, comm: Communicator, elements: int, room: Room) -> Callable[[], Any]:
    """As training calls it."""
    call = OPERATIONS[operation](comm, room.sent[:elements], room.received[:elements])
    return lambda: call().wait()


def bare(operation: str, comm: Communicator, elements: int, room: Room) -> Callable[[], Any]:
    """The same by the library alone, on the caller's own thread: for nobody else may it be at work."""
    return OPERATIONS[operation](comm.backend, room.sent[:elements], room.received[:elements])
