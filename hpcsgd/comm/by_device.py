"""Two backends for one communicator: one for tensors on devices, one for everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcsgd.comm.backend import Backend, Ending, Reduction
from hpcsgd.comm.staged import Staged

DeviceBackendOf = Callable[[Backend], Backend]
"""A function that makes a backend for device tensors from the same ranks' host backend; collective."""


class ByDevice(Backend):
    """A backend that uses the backend `devices` for device tensors, and `host` for host tensors.

    Backends that its `split` makes send device tensors by `Staged`.
    """

    def __init__(self, host: Backend, beside: DeviceBackendOf = Staged) -> None:
        self.rank, self.size, self.node, self.name = host.rank, host.size, host.node, host.name
        self.thread_level = host.thread_level
        self._host = host
        self.devices = beside(host)
        self.returns_early = self.devices.returns_early

    @property
    def host(self) -> Backend:
        return self._host

    def accepts(self, device: torch.device) -> bool:
        return self._host.accepts(device) or self.devices.accepts(device)

    def alltoall(self, out: Tensor, x: Tensor) -> None:
        self._of(x).alltoall(out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: Reduction) -> None:
        self._of(x).reduce_scatter(out, x, reduction)

    def allgather(self, out: Tensor, x: Tensor) -> None:
        self._of(x).allgather(out, x)

    def allgatherv(self, out: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        self._of(x).allgatherv(out, x, counts)

    def allreduce(self, x: Tensor, reduction: Reduction) -> None:
        self._of(x).allreduce(x, reduction)

    def bcast(self, x: Tensor, root: int) -> None:
        self._of(x).bcast(x, root)

    def sendrecv(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> None:
        for x in (*send.values(), *recv.values()):
            return self._of(x).sendrecv(send, recv)

    def send(self, x: Tensor, to: int) -> None:
        self._of(x).send(x, to)

    def recv(self, out: Tensor, source: int) -> int:
        return self._of(out).recv(out, source)

    def gather_objects(self, item: Any) -> list[Any]:
        return self._host.gather_objects(item)

    def post_record(self, record: bytes, received: bytearray) -> Ending:
        return self._host.post_record(record, received)

    def split(self, color: int, key: int) -> Backend:
        return ByDevice(self._host.split(color, key))

    def abort(self, code: int) -> None:
        self._host.abort(code)

    def _of(self, x: Tensor) -> Backend:
        return self._host if x.is_cpu else self.devices
