"""What a library that moves bytes between ranks must offer; `Communicator` builds everything else on it."""

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
"""As a source: whoever sends first."""
Ending = Callable[[float], bool]
"""Of an operation under way: wait for its end so many seconds at most, and return whether it has come."""
# Seconds: how long to look for the end of an operation without a pause, and the longest pause thereafter.
_EAGER = 1e-4
_LONGEST_PAUSE = 5e-4
_NARROW = frozenset({torch.float16, torch.bfloat16})


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums and what grows by little are kept: 16-bit floats overflow and lose what is small."""
    return torch.float32 if dtype in _NARROW else dtype


class PeerLost(RuntimeError):
    """Ranks did not answer in time or are known to be gone. `ranks` is empty where nobody can tell which."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def polled(has_ended: Callable[[], bool], seconds: float) -> bool:
    """Ask until something `has_ended`, for so many `seconds` at most, and return whether it has.

    Between two questions it rests a tenth of the time it has taken so far, so that others get the core.
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
    """Of what it says: libraries go on with where they stood."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class Backend(ABC):
    """Blocking operations of one communicator, called by one thread at a time; one more may receive, or
    send, messages meanwhile. Sums and means of 16-bit floats are made in float32 and rounded once.

    Tensors arrive checked: contiguous, without autograd history, on a device the backend `accepts`, with
    sizes that fit. Everything returns once the caller may reuse its tensors.
    """

    rank: int
    size: int
    node: int
    """Ranks with equal `node` share memory: the lowest world rank among them."""
    name: str
    """The library and its version, for logs and run folders."""
    thread_level: str = "MULTIPLE"
    """What the library allows threads to do, in MPI's own word."""
    returns_early: bool = False
    """Whether operations on tensors on devices may return before other ranks have begun them, or stand still
    for other reasons."""

    @property
    @abstractmethod
    def host(self) -> Backend:
        """The backend of the same ranks for host tensors: this one itself, unless it wraps another backend
        for tensors on devices."""

    @abstractmethod
    def accepts(self, device: torch.device) -> bool: ...

    @abstractmethod
    def alltoall(self, out: Tensor, x: Tensor) -> None:
        """`out[i] = x[own rank]` of rank i, both cut in `size` equal runs."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: Reduction) -> None:
        """`out` = the sum or mean over ranks i of their `x[own rank]`, `x` cut in `size` equal runs."""

    @abstractmethod
    def allgather(self, out: Tensor, x: Tensor) -> None:
        """`out[i] = x` of rank i, `out` cut in `size` equal runs; x may be the own run of out."""

    @abstractmethod
    def allgatherv(self, out: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        """`out` = the x of all ranks one after another, `counts[i]` elements from rank i."""

    @abstractmethod
    def allreduce(self, x: Tensor, reduction: Reduction) -> None:
        """In place, the same bits on every rank."""

    @abstractmethod
    def bcast(self, x: Tensor, root: int) -> None:
        """In place."""

    @abstractmethod
    def sendrecv(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> None:
        """Send to and receive from the ranks that are the keys, all at once."""

    @abstractmethod
    def send(self, x: Tensor, to: int) -> None: ...

    @abstractmethod
    def recv(self, out: Tensor, source: int) -> int:
        """Receive from `source` or from `ANY`; return who sent."""

    @abstractmethod
    def gather_objects(self, item: Any) -> list[Any]:
        """The picklable `item` of every rank, in rank order, on every rank."""

    @abstractmethod
    def post_record(self, record: bytes, received: bytearray) -> Ending:
        """Begin to gather the `record` of every rank, of one length, in rank order in `received`. Any one
        thread may call it, beside all other operations, as long as nothing else uses the communicator."""

    @abstractmethod
    def split(self, color: int, key: int) -> Backend:
        """Ranks of one `color` become a communicator, ordered by (key, rank)."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every rank of the job now."""
