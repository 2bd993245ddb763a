"""Communication of device tensors by a library that only knows host memory, through pinned memory.

Copies run on the current stream, which is a communication thread's own. The host waits for copies from the
device before the library reads them. Nothing waits for copies to the device, because later work on that
stream, or ordered after it, sees them. Pinned memory comes from torch's cache, which reuses it when the
copies are done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcsgd.comm.backend import Backend, Ending, Reduction
from hpcsgd.comm.streams import on_accelerator, settle


class Staged(Backend):
    """A backend for device tensors that copies them through pinned memory and sends them by `host`."""

    def __init__(self, host: Backend) -> None:
        self.rank, self.size, self.node = host.rank, host.size, host.node
        self.name = f"{host.name} by way of pinned memory"
        self._host = host

    @property
    def host(self) -> Backend:
        return self._host

    def accepts(self, device: torch.device) -> bool:
        return on_accelerator(device)

    def alltoall(self, out: Tensor, x: Tensor) -> None:
        received = _room(out)
        self._host.alltoall(received, _down(x))
        _up(out, received)

    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: Reduction) -> None:
        received = _room(out)
        self._host.reduce_scatter(received, _down(x), reduction)
        _up(out, received)

    def allgather(self, out: Tensor, x: Tensor) -> None:
        received = _room(out)
        own = received.view(self.size, -1)[self.rank]
        own.copy_(x.view(-1), non_blocking=True)
        settle(x.device)
        self._host.allgather(received, own)
        _up(out, received)

    def allgatherv(self, out: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        received = _room(out)
        self._host.allgatherv(received, _down(x), counts)
        _up(out, received)

    def allreduce(self, x: Tensor, reduction: Reduction) -> None:
        reduced = _down(x)
        self._host.allreduce(reduced, reduction)
        _up(x, reduced)

    def bcast(self, x: Tensor, root: int) -> None:
        staged = _down(x) if self.rank == root else _room(x)
        self._host.bcast(staged, root)
        if self.rank != root:
            _up(x, staged)

    def sendrecv(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> None:
        sent = {to: _room(x).copy_(x, non_blocking=True) for to, x in send.items()}
        for device in {x.device for x in send.values()}:
            settle(device)
        received = {source: _room(out) for source, out in recv.items()}
        self._host.sendrecv(sent, received)
        for source, out in recv.items():
            _up(out, received[source])

    def send(self, x: Tensor, to: int) -> None:
        self._host.send(_down(x), to)

    def recv(self, out: Tensor, source: int) -> int:
        received = _room(out)
        sender = self._host.recv(received, source)
        _up(out, received)
        return sender

    def gather_objects(self, item: Any) -> list[Any]:
        return self._host.gather_objects(item)

    def post_record(self, record: bytes, received: bytearray) -> Ending:
        return self._host.post_record(record, received)

    def split(self, color: int, key: int) -> Backend:
        return Staged(self._host.split(color, key))

    def abort(self, code: int) -> None:
        self._host.abort(code)


def _room(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)


def _down(x: Tensor) -> Tensor:
    here = _room(x).copy_(x, non_blocking=True)
    settle(x.device)
    return here


def _up(x: Tensor, here: Tensor) -> None:
    x.copy_(here, non_blocking=True)
