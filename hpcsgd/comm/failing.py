"""Planned faults for tests: a backend that fails at a given step of a given rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcsgd.comm.backend import Backend, Ending, Reduction


class Faults:
    """Planned faults, which `at` adds. The code that counts the steps of a rank sets `step[rank]`.

    A fault is any callable: one that raises, one that never returns, one that kills the process.
    """

    def __init__(self) -> None:
        self.step: dict[int, int] = {}
        self._planned: dict[tuple[int, int], Callable[[], None]] = {}

    def at(self, rank: int, step: int, fault: Callable[[], None]) -> Faults:
        self._planned[rank, step] = fault
        return self

    def happen(self, rank: int) -> None:
        """Run the fault of this step once, if there is one; called before every operation of `rank`."""
        fault = self._planned.pop((rank, self.step.get(rank, 0)), None)
        if fault is not None:
            fault()


class FailingBackend(Backend):
    """A backend around `inner` with the faults planned for `world_rank`, by default the rank of `inner`."""

    def __init__(self, inner: Backend, faults: Faults, world_rank: int | None = None) -> None:
        self.rank, self.size, self.node, self.name = inner.rank, inner.size, inner.node, inner.name
        self._inner = inner
        self._faults = faults
        self._world_rank = inner.rank if world_rank is None else world_rank

    def _usable(self) -> Backend:
        self._faults.happen(self._world_rank)
        return self._inner

    @property
    def host(self) -> Backend:
        return self

    def accepts(self, device: torch.device) -> bool:
        return self._inner.accepts(device)

    def alltoall(self, out: Tensor, x: Tensor) -> None:
        self._usable().alltoall(out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: Reduction) -> None:
        self._usable().reduce_scatter(out, x, reduction)

    def allgather(self, out: Tensor, x: Tensor) -> None:
        self._usable().allgather(out, x)

    def allgatherv(self, out: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        self._usable().allgatherv(out, x, counts)

    def allreduce(self, x: Tensor, reduction: Reduction) -> None:
        self._usable().allreduce(x, reduction)

    def bcast(self, x: Tensor, root: int) -> None:
        self._usable().bcast(x, root)

    def sendrecv(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> None:
        self._usable().sendrecv(send, recv)

    def send(self, x: Tensor, to: int) -> None:
        self._usable().send(x, to)

    def recv(self, out: Tensor, source: int) -> int:
        return self._usable().recv(out, source)

    def gather_objects(self, item: Any) -> list[Any]:
        return self._usable().gather_objects(item)

    def post_record(self, record: bytes, received: bytearray) -> Ending:
        return self._usable().post_record(record, received)

    def split(self, color: int, key: int) -> Backend:
        return FailingBackend(self._usable().split(color, key), self._faults, self._world_rank)

    def abort(self, code: int) -> None:
        self._inner.abort(code)
