"""Ranks as members of a process group of torch.distributed, for tensors on devices.

Groups use NCCL (RCCL, XCCL), or gloo, which runs the same code without devices. No default group is made or
changed, because the user may have one. Each group has its own store, whose address the host backend sends to
all ranks. torch.distributed is imported only when a group is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import os
import socket
import struct
import weakref
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from hpcsgd import torch_private
from hpcsgd.comm import sums
from hpcsgd.comm.backend import ANY, Backend, Ending, PeerLost, Reduction, first_line
from hpcsgd.comm.shutdown import close_at_the_end, end_by
from hpcsgd.comm.streams import StreamEvent
from hpcsgd.comm.watch import Watch
from hpcsgd.errors import PEER_LOST, UserError

LIBRARIES = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}
"""The library for each kind of device; RCCL has NCCL's name."""
INTERFACE = "GLOO_SOCKET_IFNAME"
REMEDY = (
    f"enter the names of the hosts in DNS or /etc/hosts, or set {INTERFACE} to the network interface that "
    "leads from one to the other, as eth0"
)


class GroupBackend(Backend):
    """The ranks of `host`, for tensors of one kind of device; `host` sends objects and makes splits.

    Data that is only moved travels as bytes, whatever its type. 16-bit floats are summed in float32 and
    rounded once. Only `sendrecv` can send to this rank itself, and `recv` needs a named sender. On a device,
    work is ordered before later work of the current stream. If the work is not done in time, `Watch` ends the
    job.
    """

    def __init__(self, host: Backend, library: str, timeout: float) -> None:
        self.rank, self.size, self.node = host.rank, host.size, host.node
        self.name = _named(library)
        self.returns_early = library != "gloo"
        self._host, self._library, self._timeout = host, library, timeout
        self._store = meeting_point(host, timeout)
        self._group: Any = _made(library, self._store, host, timeout)
        host.gather_objects(None)  # a rank that left now would block others to which gloo still connects
        self._watch = Watch(timeout, functools.partial(_end, host, timeout))
        weakref.finalize(self, self._watch.close)
        close_at_the_end(self)

    @property
    def host(self) -> Backend:
        return self._host

    def accepts(self, device: torch.device) -> bool:
        return LIBRARIES.get(device.type) == self._library

    def alltoall(self, out: Tensor, x: Tensor) -> None:
        if x.numel():
            self._complete(self._group.alltoall_base(as_bytes(out), as_bytes(x), [], []), "alltoall", x)

    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: Reduction) -> None:
        if sums.is_narrow(x):
            sums.reduce_scatter(self, out, x, reduction)
        elif x.numel():
            work = torch_private.reduce_scatter(self._group, out.view(-1), x.view(-1))
            self._complete(work, "reduce_scatter", x)
            if reduction == "mean":
                out.div_(self.size)

    def allgather(self, out: Tensor, x: Tensor) -> None:
        if x.numel():
            self._complete(torch_private.allgather(self._group, as_bytes(out), as_bytes(x)), "allgather", x)

    def allgatherv(self, out: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        runs = torch.split(out.view(-1), list(counts))
        runs[self.rank].copy_(x.view(-1))
        for root, run in enumerate(runs):
            self.bcast(run, root)

    def allreduce(self, x: Tensor, reduction: Reduction) -> None:
        if sums.is_narrow(x):
            sums.allreduce(self, x, reduction)
        elif x.numel():
            self._complete(self._group.allreduce([x.view(-1)], _reducing(reduction)), "allreduce", x)
            if reduction == "mean":
                x.div_(self.size)

    def bcast(self, x: Tensor, root: int) -> None:
        if x.numel():
            self._complete(self._group.broadcast([as_bytes(x)], starting_at(root)), "bcast", x)

    def sendrecv(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> None:
        if self.rank in recv:
            recv[self.rank].copy_(send[self.rank])
        self._messages(
            {to: x for to, x in send.items() if to != self.rank},
            {source: x for source, x in recv.items() if source != self.rank},
        )

    def send(self, x: Tensor, to: int) -> None:
        self._messages({to: x}, {})

    def recv(self, out: Tensor, source: int) -> int:
        if source == ANY:
            raise ValueError(f"{self.name} receives from a rank that is named: give it host memory")
        self._messages({}, {source: out})
        return source

    def gather_objects(self, item: Any) -> list[Any]:
        return self._host.gather_objects(item)

    def post_record(self, record: bytes, received: bytearray) -> Ending:
        return self._host.post_record(record, received)

    def split(self, color: int, key: int) -> Backend:
        return GroupBackend(self._host.split(color, key), self._library, self._timeout)

    def abort(self, code: int) -> None:
        self._host.abort(code)

    def close(self) -> None:
        """End the group, its store and their threads, whatever is in progress."""
        group, self._group, self._store = self._group, None, None
        self._watch.close()
        if group is not None:
            group.abort()

    def _messages(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> None:
        """Begin all messages at once, because one after the other on a stream they could deadlock."""
        some = [x for x in (*send.values(), *recv.values()) if x.numel()]
        if not some:
            return
        at_once = not some[0].is_cpu
        if at_once:
            torch_private.begin_together(self._group)
        works = [self._group.recv([as_bytes(x)], i, 0) for i, x in recv.items() if x.numel()]
        works += [self._group.send([as_bytes(x)], i, 0) for i, x in send.items() if x.numel()]
        if at_once:
            works = [torch_private.end_together(self._group)]
        for work in works:
            self._complete(work, "sendrecv", some[0])

    def _complete(self, work: Any, what: str, x: Tensor) -> None:
        """Wait for `work`. On a device only the current stream waits, and the watch checks progress."""
        what = f"{what} over {self.size} ranks by {self.name}"
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"{what}: {first_line(error)}") from error
        if not x.is_cpu:
            self._watch.add(what, StreamEvent(x.device).passed)


def missing(library: str) -> str:
    """Return why this build of torch cannot make groups of the library; empty if it can."""
    dist = distributed()
    there = dist.is_available() and getattr(dist, f"is_{library}_available", bool)()
    return "" if there else f"torch {torch.__version__} was built without {library.upper()}"


def _end(host: Backend, timeout: float, what: str) -> None:
    """End the job from this thread, because a thread that waits for a device cannot be interrupted."""
    end_by(PeerLost(f"{what}: not done on the device within {timeout:g} s"))
    host.abort(PEER_LOST)


def meeting_point(ranks: Backend, timeout: float) -> Any:
    """Return a store of `ranks`; rank 0 serves it and sends its address to the others. Collective."""
    TCPStore, limit = distributed().TCPStore, timedelta(seconds=timeout)
    nodes = ranks.gather_objects((ranks.node, socket.gethostname()))
    if ranks.rank == 0:
        address = address_towards([name for node, name in nodes if node != ranks.node])
        with _reaching(address):
            store = TCPStore(address, 0, is_master=True, timeout=limit, wait_for_workers=False)
        ranks.gather_objects((address, store.port))
        return store
    address, port = ranks.gather_objects(None)[0]
    with _reaching(address):
        return TCPStore(address, port, is_master=False, timeout=limit)


@contextlib.contextmanager
def _reaching(address: str) -> Generator[None, None, None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"no way from {socket.gethostname()} to {address}: {first_line(error)}") from error


def address_towards(others: Sequence[str]) -> str:
    """Return this node's address on the network that leads to the hosts `others`.

    If the name of the first of them cannot be resolved, return the address of this host's name, or else of
    gloo's interface. Raises `UserError` if there is no such address.
    """
    if not others:
        return "127.0.0.1"
    own = socket.gethostname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect((others[0], 9))  # sends nothing
            return probe.getsockname()[0]
        with contextlib.suppress(OSError):
            return socket.gethostbyname(own)
        with contextlib.suppress(OSError):
            return _address_of(os.environ.get(INTERFACE, ""), probe)
    raise UserError(f"no address for {others[0]!r} nor for this host, {own!r}: {REMEDY}")


def require_address_of_gloo() -> None:
    """Raise `UserError` if other hosts cannot reach this one.

    gloo listens on the address of the host's name, or else on the loopback interface.
    """
    if os.environ.get(INTERFACE):
        return
    name = socket.gethostname()
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    except OSError as error:
        raise UserError(f"no address for this host, {name!r} ({error.strerror}): {REMEDY}") from error
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found):
        raise UserError(
            f"the name of this host, {name!r}, stands for {min(found)}, where no other host reaches it: "
            f"{REMEDY}"
        )


def _address_of(interface: str, any_socket: socket.socket) -> str:
    """Return the address of a network interface. Raises `OSError` if it has none."""
    asked = struct.pack("256s", interface.partition(",")[0].encode()[:15])
    return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), 0x8915, asked)[20:24])  # SIOCGIFADDR


def _made(library: str, store: Any, ranks: Backend, timeout: float) -> Any:
    dist = distributed()
    limit = timedelta(seconds=2 * timeout)  # NCCL's own watch ends the process, so ours must come first
    if library == "gloo":
        return dist.ProcessGroupGloo(store, ranks.rank, ranks.size, limit)
    kind = getattr(dist, f"ProcessGroup{library.upper()}")
    options = kind.Options()
    torch_private.set_timeout(options, limit)
    return kind(store, ranks.rank, ranks.size, options)


def _named(library: str) -> str:
    if library != "nccl":
        return f"{library} of torch {torch.__version__}"
    return f"nccl {'.'.join(map(str, torch.get_device_module('cuda').nccl.version()))}"


def _reducing(reduction: Reduction) -> Any:
    """Return torch's options for a reduction. For a mean the caller divides a sum."""
    dist = distributed()
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
    return options


def starting_at(root: int) -> Any:
    options = distributed().BroadcastOptions()
    options.rootRank = root
    return options


def distributed() -> Any:
    """Return the module torch.distributed, which is imported at the first call.

    The type is Any, because much of torch.distributed has no types.
    """
    import torch.distributed

    return torch.distributed


def as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
