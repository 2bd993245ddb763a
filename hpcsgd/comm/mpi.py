"""Ranks as MPI processes, by mpi4py, for tensors in host memory; MPI must support THREAD_MULTIPLE."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hpcsgd.comm import by_node, gpu_mpi, mpi_split, ring, sums
from hpcsgd.comm.backend import ANY, Backend, Ending, Reduction, polled
from hpcsgd.comm.by_device import ByDevice
from hpcsgd.comm.comm_thread import know_processor
from hpcsgd.comm.communicator import Communicator
from hpcsgd.comm.mailed_reports import MailedReports
from hpcsgd.comm.mpi_library import MPI
from hpcsgd.comm.mpi_mail import MpiMail
from hpcsgd.comm.mpi_waits import asleep
from hpcsgd.comm.rank_watch import WORLD, Member
from hpcsgd.comm.shutdown import guard
from hpcsgd.errors import JobError
from hpcsgd.launcher import check_world, misfit

# MPI types for data that is only moved, by width in bytes: any type works (MPI has no bfloat16).
_CARRIERS = {1: MPI.UINT8_T, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T}
_REDUCED = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
}
_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX}  # the caller divides for a mean
_LEVELS = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}
# Elements of a single reduction: below 2^31, because older libraries count in a C int.
_LARGEST = 1 << 30
# Elements of a single allreduce: at 100 MB, MPICH was faster in such parts than whole or in smaller ones.
_PIECE = 1 << 22
# Message tags: of the callers' own messages, of the ring allreduce, and of `split`.
_ASKED, _RING, _SPLIT = 0, 1, 2


class MpiBackend(Backend):
    """The backend of one MPI communicator.

    16-bit floats are summed in float32 and rounded once, because MPI has no bfloat16 and adds float16 in
    float16. Blocking MPI calls would spin while they wait, on cores that other threads compute on. So all
    calls are nonblocking, and are polled with growing pauses.
    """

    def __init__(self, comm: MPI.Intracomm, nodes: Sequence[int]) -> None:
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.node = nodes[self.rank]
        self.name = " ".join(MPI.Get_library_version().splitlines()[0].strip(" \0\t").split())
        self.thread_level = thread_level()
        self._comm, self._nodes = comm, nodes
        # If ranks share nodes, the library's own allreduce sends less than a ring: it first adds up
        # in each node.
        self._one_a_node = len(set(nodes)) == self.size > 1
        self._levels = by_node.Levels(nodes)

    @property
    def host(self) -> Backend:
        return self

    def accepts(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def alltoall(self, out: Tensor, x: Tensor) -> None:
        _complete(self._comm.Ialltoall(_carried(x), _carried(out)))

    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: Reduction) -> None:
        if sums.is_narrow(x):
            sums.reduce_scatter(self, out, x, reduction)
            return
        if reduction != "max" and (levels := self._levels.of(self, x)) is not None:
            levels.reduce_scatter(out, x, reduction == "mean")
            return
        if x.numel() > _LARGEST:
            self._large_sum_scatter(out, x)
        else:
            self._sum_scatter(out, x)
        if reduction == "mean":
            out.div_(self.size)

    def allgather(self, out: Tensor, x: Tensor) -> None:
        if (levels := self._levels.of(self, out)) is not None:
            levels.allgather(out, x)
            return
        in_place = x.data_ptr() == out.view(self.size, -1)[self.rank].data_ptr()
        _complete(self._comm.Iallgather(MPI.IN_PLACE if in_place else _carried(x), _carried(out)))

    def allgatherv(self, out: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        received, kind = _carried(out)
        _complete(self._comm.Iallgatherv(_carried(x), [received, list(counts), kind]))

    def allreduce(self, x: Tensor, reduction: Reduction) -> None:
        if sums.is_narrow(x):
            sums.allreduce(self, x, reduction)
            return
        if self._one_a_node and reduction != "max" and x.is_floating_point() and ring.is_long(x, self.size):
            ring.allreduce(_Posting(self._comm), x, reduction == "mean")
            return
        for piece in torch.split(x.view(-1), _PIECE):
            operand = [piece.numpy(), _REDUCED[x.dtype]]
            _complete(self._comm.Iallreduce(MPI.IN_PLACE, operand, _OPS[reduction]))
            if reduction == "mean":
                piece.div_(self.size)

    def bcast(self, x: Tensor, root: int) -> None:
        _complete(self._comm.Ibcast(_carried(x), root))

    def sendrecv(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> None:
        requests = [self._comm.Irecv(_carried(out), source, _ASKED) for source, out in recv.items()]
        requests += [self._comm.Isend(_carried(x), to, _ASKED) for to, x in send.items()]
        for request in requests:
            _complete(request)

    def send(self, x: Tensor, to: int) -> None:
        _complete(self._comm.Isend(_carried(x), to, _ASKED))

    def recv(self, out: Tensor, source: int) -> int:
        anybody = MPI.ANY_SOURCE if source == ANY else source
        request = self._comm.Irecv(_carried(out), anybody, _ASKED)
        return _complete(request).Get_source()

    def gather_objects(self, item: Any) -> list[Any]:
        return _gathered(self._comm, item)

    def post_record(self, record: bytes, received: bytearray) -> Ending:
        return _UnderWay(self._comm.Iallgather([record, MPI.BYTE], [received, MPI.BYTE]))

    def split(self, color: int, key: int) -> Backend:
        comm, members = mpi_split.split(self._comm, color, key, _SPLIT)
        return MpiBackend(comm, [self._nodes[rank] for rank in members])

    def abort(self, code: int) -> None:
        MPI.COMM_WORLD.Abort(code)  # MPICH's launcher may miss the abort of another communicator

    def lacks(self, device: torch.device) -> str:
        """Return why the library cannot take addresses on `device`; empty if the library says that it can."""
        info = self._comm.Get_info()
        kinds = info.Get("mpi_memory_alloc_kinds") or ""
        info.Free()
        library, symbols = MPI.Get_library_version(), ctypes.CDLL(MPI.__file__)
        query = functools.partial(gpu_mpi.answer, symbols)
        return gpu_mpi.judged(
            gpu_mpi.runtime_of(device), library, kinds, query, os.environ, gpu_mpi.loaded_files()
        )

    def _sum_scatter(self, out: Tensor, x: Tensor) -> None:
        kind = _REDUCED[x.dtype]
        _complete(self._comm.Ireduce_scatter_block([x.numpy(), kind], [out.numpy(), kind]))

    def _large_sum_scatter(self, out: Tensor, x: Tensor) -> None:
        rows = x.view(self.size, -1)
        width = _LARGEST // self.size
        for start in range(0, out.numel(), width):
            piece = out.view(-1)[start : start + width]
            self._sum_scatter(piece, rows[:, start : start + width].contiguous())


class _UnderWay:
    """A request in progress; a call polls the request until it ends, as `Ending` requires.

    MPI writes into the request's buffers until it ends. The buffers are kept alive even if an exception drops
    every other reference.
    """

    _forgotten: ClassVar[list[MPI.Request]] = []
    """Requests that were dropped before they ended; their buffers are kept until the process ends."""

    def __init__(self, request: MPI.Request) -> None:
        self._request, self._has_ended = request, False
        self._testing = threading.Lock()

    def __call__(self, seconds: float) -> bool:
        return polled(self._test, seconds)

    def _test(self) -> bool:
        # The waiting thread and the watching thread both test: MPI forbids two tests of one request
        # at a time.
        with self._testing:
            self._has_ended = self._has_ended or self._request.Test()
            return self._has_ended

    def __del__(self) -> None:
        if not self._has_ended:
            self._forgotten.append(self._request)


class _Posting:
    """The messages of `ring.allreduce` in MPI. A tag of their own separates them from other messages."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._comm = comm

    def post_send(self, x: Tensor, to: int) -> MPI.Request:
        return self._comm.Isend(_carried(x), to, _RING)

    def post_recv(self, out: Tensor, source: int) -> MPI.Request:
        return self._comm.Irecv(_carried(out), source, _RING)

    def complete(self, request: MPI.Request) -> object:
        return _complete(request)


def world(timeout: float = 600.0) -> Communicator:
    """Return a communicator of all ranks that the launcher started; from now on they end together.

    Raises `JobError` if the launcher started another number of ranks, or if MPI lacks thread support.
    """
    know_processor()
    all_ranks = MPI.COMM_WORLD
    with asleep():
        shared = all_ranks.Split_type(MPI.COMM_TYPE_SHARED)
        node = shared.bcast(all_ranks.Get_rank())
        shared.Free()
        own = all_ranks.Dup()
    nodes = _gathered(all_ranks, node)
    comm = Communicator(ByDevice(MpiBackend(own, nodes)), timeout=timeout)
    ending = guard(comm)
    _check_launch(comm)
    if ending is None or comm.size == 1:
        return comm
    with asleep():
        for_reports = all_ranks.Dup()
    watch = ending.watched(MailedReports(MpiMail(for_reports), ending.fail))
    member = Member(watch, WORLD, range(comm.size))
    return Communicator(comm.backend, timeout=timeout, comm_thread=comm.comm_thread, member=member)


def thread_level() -> str:
    """Return what the MPI library allows threads to do, in MPI's terms."""
    return _LEVELS.get(MPI.Query_thread(), "unknown")


def _check_launch(world: Communicator) -> None:
    library = world.backend.name
    try:
        check_world(world.size, library, os.environ)
    except JobError:
        reported = misfit(world.size, os.environ)
        # each rank is alone in its own world, and one reports it for all
        if reported is not None and not reported.speaks:
            time.sleep(1.0)
            os._exit(1)
        raise
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise JobError(f"{library} gives threads the level {thread_level()}; MULTIPLE is needed")


def _complete(request: MPI.Request) -> MPI.Status:
    """Wait for the end of `request`."""
    status = MPI.Status()
    polled(lambda: request.Test(status), math.inf)
    return status


def _gathered(comm: MPI.Comm, item: Any) -> list[Any]:
    """Return the `item` of every rank. mpi4py offers this only as a blocking call."""
    sent = pickle.dumps(item)
    counts = np.empty(comm.Get_size(), np.int64)
    _complete(comm.Iallgather(np.array([len(sent)], np.int64), counts))
    received = bytearray(int(counts.sum()))
    _complete(comm.Iallgatherv([sent, MPI.BYTE], [received, counts.tolist(), MPI.BYTE]))
    bounds = pairwise([0, *np.cumsum(counts).tolist()])
    return [pickle.loads(memoryview(received)[start:end]) for start, end in bounds]


def _carried(x: Tensor) -> list[Any]:
    """Return the address of `x` in a form that MPI takes; `gpu_mpi` also passes tensors on devices."""
    return [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), _CARRIERS[x.element_size()]]
