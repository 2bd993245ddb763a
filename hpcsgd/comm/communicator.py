"""`Communicator`: collectives and messages on tensors, as the rest of hpcsgd uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcsgd.comm.backend import ANY, Backend, Reduction
from hpcsgd.comm.comm_thread import CommThread, Work, close_comm_threads, finished
from hpcsgd.comm.events import MESSAGE
from hpcsgd.comm.operands import device_of, nbytes, overlap, require
from hpcsgd.comm.posted import Posted
from hpcsgd.comm.rank_watch import Member, Operation, ThreadState
from hpcsgd.comm.stats import CommStats

Messages = tuple[Sequence[int], Mapping[int, Tensor]]
"""The ranks to which messages are sent, and the receive buffers for messages, by sender."""
_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_SUMMED = _FLOATS | {torch.int32, torch.int64}
_REDUCED = {"sum": _SUMMED, "mean": _FLOATS, "max": _SUMMED | {torch.uint8}}


class Communicator:
    """Collectives and messages of `size` ranks, executed in order by one communication thread.

    Every operation returns a `Work` at once; its tensors must stay untouched until `wait()` returns. All
    ranks must start the same collectives in the same order on one communication thread. Communicators made by
    `split` share their parent's thread. `dup_with_thread` makes one with its own thread, which can answer
    requests while the rank computes. `run` executes ordinary blocking code on the thread.

    Tensors must be contiguous and detached. Sums take float16, bfloat16, float32, float64, int32 and int64;
    means take the floats. Sums and means of 16-bit floats are computed in float32 and rounded once, so that a
    mean does not overflow where the sum would. Anything else raises `ValueError`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        timeout: float,
        comm_thread: CommThread | None = None,
        member: Member | None = None,
    ) -> None:
        self.backend = backend
        self.rank = backend.rank
        self.size = backend.size
        self.timeout = timeout
        self.comm_thread = comm_thread or CommThread(f"communication thread of rank {backend.rank}")
        self.stats = CommStats()
        self.member = member
        """The object that reports this rank's operations on this communicator to its `RankWatch`, which
        finds deadlocks. None without a watch."""
        if member is not None:
            member.watch.adopt(self.comm_thread.state)
        self.device_backend = "mpi"
        """The library that sends tensors on devices; with "mpi" they are copied through host memory."""
        self.chosen = ""
        """The backend, and why it was chosen; empty except on the communicator of all ranks."""
        self._place: ThreadState | None = None
        self._control: Communicator | None = None
        self.dup_threads: list[CommThread] = []
        """The extra communication threads of this communicator and of those made from it."""

    def alltoall(self, out: Tensor, x: Tensor) -> Work:
        """Set part i of `out` to part `rank` of the `x` of rank i; both are cut into `size` equal parts."""
        self._check(out, x)
        require(x.numel() % self.size == 0, f"alltoall of {x.numel()} elements over {self.size} ranks")
        require(out.numel() == x.numel(), f"alltoall of {x.numel()} elements into {out.numel()}")
        return self._start("alltoall", self._share(x), lambda: self.backend.alltoall(out, x), out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: Reduction = "sum") -> Work:
        """Set `out` to the sum or mean of part `rank` of all ranks' `x`, which is cut into `size` parts."""
        require(reduction != "max", "reduce_scatter of a max: sums and means are scattered")
        self._check(out, x, allowed=_REDUCED[reduction])
        require(x.numel() == out.numel() * self.size, f"reduce_scatter of {x.numel()} into {out.numel()}")
        operation = lambda: self.backend.reduce_scatter(out, x, reduction)  # noqa: E731
        return self._start("reduce_scatter", self._share(x), operation, out, x)

    def allgather(self, out: Tensor, x: Tensor) -> Work:
        """Set part i of `out` to the `x` of rank i; `x` may be a view of this rank's part of `out`."""
        in_place = x.data_ptr() == out.data_ptr() + self.rank * nbytes(x)
        self._check(out) if in_place else self._check(out, x)
        require(out.numel() == x.numel() * self.size, f"allgather of {x.numel()} into {out.numel()}")
        return self._start("allgather", self._share(out), lambda: self.backend.allgather(out, x), out, x)

    def allgatherv(self, out: Tensor, x: Tensor, counts: Sequence[int]) -> Work:
        """Concatenate the `x` of all ranks in `out` in rank order, `counts[i]` elements from rank i."""
        self._check(out, x)
        require(
            len(counts) == self.size and out.numel() == sum(counts) and x.numel() == counts[self.rank],
            f"allgatherv of {x.numel()} into {out.numel()} with counts {list(counts)}",
        )
        sent = (self.size - 1) * nbytes(x)
        operation = lambda: self.backend.allgatherv(out, x, counts)  # noqa: E731
        needed = lambda: [i for i, n in enumerate(counts) if n]  # noqa: E731
        return self._start("allgatherv", sent, operation, out, x, needed=needed)

    def allreduce(self, x: Tensor, reduction: Reduction = "sum") -> Work:
        """Set `x` to the sum, mean or maximum of `x` over the ranks, with the same bits on every rank."""
        self._check(x, allowed=_REDUCED[reduction])
        operation = lambda: self.backend.allreduce(x, reduction)  # noqa: E731
        return self._start("allreduce", 2 * self._share(x), operation, x)

    def bcast(self, x: Tensor, root: int = 0) -> Work:
        """Copy the `x` of rank `root` into every other rank's `x`."""
        self._check(x)
        needed = lambda: [root] if self.rank != root else []  # noqa: E731
        operation = lambda: self.backend.bcast(x, root)  # noqa: E731
        return self._start("bcast", self._share(x), operation, x, needed=needed)

    def sendrecv(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> Work:
        """Send `send[i]` to each rank i, and receive `recv[j]` from each rank j, all at once."""
        self._check(*send.values(), *recv.values(), alike=False)
        sent = self._posted(send)
        operation = lambda: self.backend.sendrecv(send, recv)  # noqa: E731
        tensors = (*send.values(), *recv.values())
        return self._start("sendrecv", sent, operation, *tensors, messages=(tuple(send), recv))

    def send(self, x: Tensor, to: int) -> Work:
        """Send one message to rank `to`."""
        self._check(x)
        operation = lambda: self.backend.send(x, to)  # noqa: E731
        return self._start("send", self._posted({to: x}), operation, x, messages=((to,), {}))

    def recv(self, out: Tensor, source: int = ANY) -> Work:
        """Receive one message from `source`, or from any rank by default; `wait()` returns the sender."""
        self._check(out)
        messages: Messages = ((), {} if source == ANY else {source: out})
        return self._start("recv", 0, lambda: self.backend.recv(out, source), out, messages=messages)

    def gather_objects(self, item: Any) -> list[Any]:
        """Return the picklable `item` of every rank, in rank order. Blocks; for set-up and metadata.

        `stats` does not count the bytes of pickles: their size is no property of the method.
        """
        if self.size == 1:
            return [item]
        return self._start("gather_objects", 0, lambda: self.backend.gather_objects(item)).wait()

    def post_record(self, record: bytes) -> Work:
        """Gather the `record` of every rank without the communication thread.

        All records have the same length. `wait()` returns them joined in rank order; nothing else may use
        this communicator until then. `stats` does not count their bytes, because they are metadata like
        pickles.
        """
        label = f"allgather over {self.size} ranks"
        if self._place is None:
            self._place = ThreadState()
            if self.member is not None:
                self.member.watch.adopt(self._place)
        self.stats.add(calls=1)
        received = bytearray(self.size * len(record))
        operation = self.member.collective(label) if self.member is not None and self.size > 1 else None
        posted = Posted(self.backend.post_record(record, received), received, self._place, operation)
        return Work(posted, label, self.timeout, self.stats, thread=self._place)

    def barrier(self) -> None:
        """Return once every rank has called this method."""
        self.gather_objects(None)

    def split(self, color: int, key: int) -> Communicator:
        """Return a communicator of the ranks of one `color`, ordered by (`key`, rank), on the same thread."""
        return self._relative(*self._part(color, key), self.comm_thread)

    def dup_with_thread(self) -> Communicator:
        """Return a communicator of the same ranks with its own communication thread."""
        return self._relative(*self._part(0, self.rank), self.comm_thread).with_own_thread()

    @property
    def control(self) -> Communicator:
        """A second communicator of the same ranks on the same thread; the first access is collective."""
        # No cached_property: in Python 3.11 its lock is shared by all instances.
        if self._control is None:
            self._control = self.split(0, self.rank)
        return self._control

    def with_own_thread(self) -> Communicator:
        """Return this communicator on a new thread; only that thread may use it from then on."""
        comm_thread = CommThread(f"own communication thread of rank {self.rank}")
        self.dup_threads.append(comm_thread)
        return self.with_thread(comm_thread)

    def with_thread(self, comm_thread: CommThread) -> Communicator:
        """Return this communicator on another thread, to send on one thread while the other receives."""
        return self._relative(self.backend, self.member, comm_thread)

    def with_backend(self, backend: Backend, way: str) -> Communicator:
        """Return this communicator with another backend; communicators that it splits do not inherit it."""
        made = self._relative(backend, self.member, self.comm_thread)
        made.device_backend = way
        return made

    def close_dups(self, timeout: float) -> bool:
        """End the `dup_threads`; return False if one is still busy after `timeout` seconds. Collective."""
        self.run(lambda: None, "calls that are still pending").wait()
        return close_comm_threads(timeout, self.dup_threads)

    def run(self, call: Callable[[], Any], what: str, *tensors: Tensor) -> Work:
        """Execute `call`, blocking code, on the communication thread; for device `tensors`, on its stream."""
        return self.comm_thread.submit(call, what, self.timeout, self.stats, device_of(tensors), tensors)

    def _part(self, color: int, key: int) -> tuple[Backend, Member | None]:
        def split() -> tuple[Backend, Member | None]:
            backend = self.backend.split(color, key)
            if self.member is None:
                return backend, None
            return backend, self.member.split(color, backend.gather_objects(self.member.watch.rank))

        return self._start("split", 0, split).wait()

    def _start(
        self,
        what: str,
        sent: float,
        operation: Callable[[], Any],
        *tensors: Tensor,
        needed: Callable[[], Iterable[int]] | None = None,
        messages: Messages | None = None,
    ) -> Work:
        """Submit `operation`, which waits for all ranks, the ranks `needed`, or the senders of `messages`."""
        label, member = f"{what} over {self.size} ranks", self.member
        self.stats.add(calls=1, sent=sent)  # counted in the step that submits, not in that which executes

        def timed() -> Any:
            start = time.perf_counter()
            if member is not None and self.size > 1:
                self.comm_thread.state.executing = self._begun(label, member, tensors, needed, messages)
            try:
                return operation()
            finally:
                if member is not None and self.size > 1:
                    self.comm_thread.state.executing = None
                end = time.perf_counter()
                self.stats.add(seconds=end - start)
                if self.size > 1:
                    self.stats.note(MESSAGE, what, start, end, sent, self.size)

        if self.size == 1:  # no rank to wait for
            return finished(timed, label, self.stats)
        device = device_of(tensors)
        return self.comm_thread.submit(timed, label, self.timeout, self.stats, device, tensors, single=True)

    def _begun(
        self,
        label: str,
        member: Member,
        tensors: Sequence[Tensor],
        needed: Callable[[], Iterable[int]] | None,
        messages: Messages | None,
    ) -> Operation:
        if messages is not None:
            to, received = messages
            operation = member.messages(label, to, {i: x.numel() > 0 for i, x in received.items()})
        else:

            def awaited() -> Iterable[int] | None:
                empty = bool(tensors) and not any(x.numel() for x in tensors)  # then nothing is sent
                return [] if empty else needed and needed()

            operation = member.collective(label, awaited)
        if self.backend.returns_early and device_of(tensors) is not None:
            operation.needs = None
        return operation

    def _relative(self, backend: Backend, member: Member | None, thread: CommThread) -> Communicator:
        made = Communicator(backend, timeout=self.timeout, comm_thread=thread, member=member)
        made.stats, made.dup_threads = self.stats, self.dup_threads
        return made

    def _posted(self, messages: Mapping[int, Tensor]) -> int:
        """Count `messages` in `stats` and return their bytes; those to this rank itself do not count."""
        sizes = {to: nbytes(x) for to, x in messages.items() if to != self.rank}
        self.stats.add_messages(sizes)
        return sum(sizes.values())

    def _share(self, whole: Tensor) -> float:
        return (self.size - 1) * nbytes(whole) / self.size

    def _check(
        self, *tensors: Tensor, allowed: frozenset[torch.dtype] | None = None, alike: bool = True
    ) -> None:
        for x in tensors:
            require(x.is_contiguous(), f"tensor of strides {x.stride()}: only contiguous ones are sent")
            require(not x.requires_grad, "tensor with requires_grad: send its .detach()")
            require(
                self.backend.accepts(x.device), f"tensor on {x.device}: {self.backend.name} cannot send it"
            )
            require(not x.is_complex(), f"{x.dtype}: complex tensors are not sent")
            if allowed is not None:
                names = ", ".join(sorted(str(t).removeprefix("torch.") for t in allowed))
                require(x.dtype in allowed, f"{x.dtype} cannot be reduced; allowed: {names}")
            require(not alike or x.dtype == tensors[0].dtype, f"{x.dtype} with {tensors[0].dtype}")
        if alike and len(tensors) == 2:
            require(not overlap(*tensors), "send and receive tensors share memory")
