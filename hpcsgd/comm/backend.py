"""The interface of a library that moves bytes between ranks; `Communicator` builds on it."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Reduction = Literal["sum", "mean", "max"]
ANY = -1
"""Given as the source of a message: any rank may send it."""
Ending = Callable[[float], bool]
"""A function that waits at most the given seconds for an operation, and returns whether it has ended."""
# Seconds: how long to poll an operation without pauses, and the longest pause thereafter.
_EAGER = 1e-4
_LONGEST_PAUSE = 5e-4
_NARROW = frozenset({torch.float16, torch.bfloat16})


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of `dtype`, and for values that change by small amounts.

    It is float32 for 16-bit floats, in which sums overflow and small increments vanish. Otherwise it is
    `dtype`.
    """
    return torch.float32 if dtype in _NARROW else dtype


class PeerLost(RuntimeError):
    """Ranks did not answer in time, or are known to be gone. `ranks` lists them; it is empty if unknown."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def polled(has_ended: Callable[[], bool], seconds: float) -> bool:
    """Call `has_ended` until it returns True, for at most `seconds`, and return its last result.

    Between two calls it sleeps for a tenth of the time that has passed, so that other threads get the
    core.
    """
    start = time.perf_counter()
    while not has_ended():
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return False
        if elapsed < _EAGER:
            os.sched_yield()
        else:
            time.sleep(min(elapsed / 10, _LONGEST_PAUSE))
    return True


def first_line(error: BaseException) -> str:
    """Return the first line of the error's text; libraries append their source locations to it."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class Backend(ABC):
    """Blocking operations of one communicator.

    One thread at a time calls operations. Meanwhile, one more thread may send or receive messages. Sums and
    means of 16-bit floats are computed in float32 and rounded once.

    `Communicator` has checked the tensors: contiguous, without autograd history, on a device that the
    backend `accepts`, with sizes that fit. Every operation returns once the caller may reuse its tensors.
    """

    rank: int
    size: int
    node: int
    """A number that identifies this rank's node: the lowest world rank on the node."""
    name: str
    """The library and its version, for logs and run folders."""
    thread_level: str = "MULTIPLE"
    """What the library allows threads to do: one of MPI's thread levels, without `MPI_THREAD_`."""
    returns_early: bool = False
    """True if operations on device tensors may return before other ranks have begun them, or may wait for
    something else than these ranks. It is then unknown for which ranks an operation waits."""

    @property
    @abstractmethod
    def host(self) -> Backend:
        """The backend of the same ranks for host tensors.

        This is the backend itself, unless it wraps another one for tensors on devices.
        """

    @abstractmethod
    def accepts(self, device: torch.device) -> bool: ...

    @abstractmethod
    def alltoall(self, out: Tensor, x: Tensor) -> None:
        """Set part i of `out` to part `rank` of the `x` of rank i; both are cut into `size` equal parts."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: Reduction) -> None:
        """Set `out` to the sum or mean of part `rank` of all ranks' `x`, which is cut into `size` parts."""

    @abstractmethod
    def allgather(self, out: Tensor, x: Tensor) -> None:
        """Set part i of `out` to the `x` of rank i; `x` may be a view of this rank's part of `out`."""

    @abstractmethod
    def allgatherv(self, out: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        """Concatenate the `x` of all ranks in `out`, `counts[i]` elements from rank i."""

    @abstractmethod
    def allreduce(self, x: Tensor, reduction: Reduction) -> None:
        """Reduce `x` in place, to the same bits on every rank."""

    @abstractmethod
    def bcast(self, x: Tensor, root: int) -> None:
        """Copy the `x` of rank `root` into every other rank's `x`."""

    @abstractmethod
    def sendrecv(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> None:
        """Send `send[i]` to each rank i, and receive `recv[j]` from each rank j, all at once."""

    @abstractmethod
    def send(self, x: Tensor, to: int) -> None: ...

    @abstractmethod
    def recv(self, out: Tensor, source: int) -> int:
        """Receive a message into `out` from rank `source`, or from `ANY` rank; return the sender's rank."""

    @abstractmethod
    def gather_objects(self, item: Any) -> list[Any]:
        """Return the picklable `item` of every rank, in rank order."""

    @abstractmethod
    def post_record(self, record: bytes, received: bytearray) -> Ending:
        """Begin to gather the `record` of every rank into `received`, in rank order.

        All records have the same length. Any one thread may call this while operations of other communicators
        run, if nothing else uses this communicator.
        """

    @abstractmethod
    def split(self, color: int, key: int) -> Backend:
        """Return a backend for the ranks with this `color`, ordered by (key, rank)."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every rank of the job now."""
