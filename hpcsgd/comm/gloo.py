"""Ranks as processes without MPI, which communicate by gloo, for tensors in host memory.

gloo only moves bytes here. Sums are computed in rank order, so that they have the same bits as those of ranks
that are threads. gloo's own time limits are off, because one would break all connections of a group. Instead,
`comm_thread.Work.wait` gives up after the timeout, and the job ends.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from hpcsgd import torch_private
from hpcsgd.comm import by_node, sums
from hpcsgd.comm.backend import ANY, Backend, Ending, PeerLost, Reduction, first_line, polled
from hpcsgd.comm.connections import Connections
from hpcsgd.comm.mailbox import FOR_EVER, Inbox, Outbox
from hpcsgd.comm.process_group import as_bytes, distributed, starting_at

EAGER = 1 << 16
"""Bytes up to which `send` returns before the message is received, like MPI's eager messages."""
SHORT = 1 << 15
"""Total bytes of all ranks up to which an allreduce sends every operand to every rank."""
# Tags: of messages that callers send, and of those that make up an allgather.
_ASKED, _GATHERED = 0, 1
PARTING = 5.0
"""Seconds that a leaving rank waits until messages that it has begun to send are received."""


class GlooBackend(Backend):
    """The backend of one communicator, with its own gloo process group."""

    def __init__(self, connections: Connections | None, name: str, rank: int, size: int, node: int) -> None:
        self.rank, self.size, self.node = rank, size, node
        self.name = f"gloo of torch {torch.__version__}"
        self._connections, self._prefix, self._splits = connections, name, 0
        self._inbox, self._outbox = Inbox(), Outbox()
        self._collector: threading.Thread | None = None
        self._group: Any = None
        if size > 1 and connections is not None:
            self._group = _guarded(lambda: self._connected(connections), "connecting", self)
            connections.add(self)
        self._levels = by_node.Levels([node])  # until the other ranks have reported their nodes
        # After this all ranks are connected. A rank that left earlier would block the others.
        self._levels = by_node.Levels(self.gather_objects(node))

    @property
    def host(self) -> Backend:
        return self

    def accepts(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def alltoall(self, out: Tensor, x: Tensor) -> None:
        if self.size == 1:
            out.view(-1).copy_(x.view(-1))
        elif x.numel():
            self._complete("alltoall", lambda: self._group.alltoall_base(as_bytes(out), as_bytes(x), [], []))

    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: Reduction) -> None:
        if reduction != "max" and not sums.is_narrow(x) and (levels := self._levels.of(self, x)) is not None:
            levels.reduce_scatter(out, x, reduction == "mean")
        else:
            sums.reduce_scatter(self, out, x, reduction)

    def allgather(self, out: Tensor, x: Tensor) -> None:
        if self.size == 1:
            out.view(-1).copy_(x.view(-1))
        elif (levels := self._levels.of(self, out)) is not None:
            levels.allgather(out, x)
        elif x.numel():
            self._complete(
                "allgather", lambda: torch_private.allgather(self._group, as_bytes(out), as_bytes(x))
            )

    def allgatherv(self, out: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        runs = torch.split(out.view(-1), list(counts))
        runs[self.rank].copy_(x.view(-1))
        others = [i for i in range(self.size) if i != self.rank]
        self._messages(dict.fromkeys(others, x), {i: runs[i] for i in others}, _GATHERED, "allgatherv")

    def allreduce(self, x: Tensor, reduction: Reduction) -> None:
        if self.size == 1:
            return
        if self.size * x.nbytes > SHORT:
            self._allreduce_in_shares(x, reduction)
            return
        rows = x.new_empty(self.size, x.numel())
        self.allgather(rows, x)
        x.view(-1).copy_(sums.reduced(rows.unbind(), reduction))

    def bcast(self, x: Tensor, root: int) -> None:
        if x.numel() and self.size > 1:
            self._complete("bcast", lambda: self._group.broadcast([as_bytes(x)], starting_at(root)))

    def sendrecv(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> None:
        if self.rank in send:
            self._inbox.put(self.rank, send[self.rank].clone())
        sent = {to: x for to, x in send.items() if to != self.rank}
        posted = {} if self._collector else {i: out for i, out in recv.items() if i != self.rank}
        self._messages(sent, posted, _ASKED, "sendrecv")
        for source in recv.keys() - posted.keys():
            self._open(recv[source], source)

    def send(self, x: Tensor, to: int) -> None:
        if to == self.rank or not 0 < x.nbytes <= EAGER:
            self.sendrecv({to: x}, {})
            return
        copy = as_bytes(x).clone()
        self._outbox.put(_guarded(lambda: self._group.send([copy], to, _ASKED), "send", self))

    def recv(self, out: Tensor, source: int) -> int:
        if source != ANY:
            self.sendrecv({}, {source: out})
            return source
        if self._collector is None and self.size > 1:
            self._collect(torch.empty_like(as_bytes(out)))
        return self._open(out, ANY)

    def gather_objects(self, item: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        self.allgather(lengths, torch.tensor([data.numel()]))
        counts = [int(n) for n in lengths]
        rows = torch.zeros(self.size, max(counts), dtype=torch.uint8)
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: data.numel()] = data
        self.allgather(rows, padded)
        return [pickle.loads(bytes(row[:n].numpy())) for row, n in zip(rows, counts, strict=True)]

    def post_record(self, record: bytes, received: bytearray) -> Ending:
        if self.size == 1:
            received[:] = record
            return lambda seconds: True
        x, out = (torch.frombuffer(data, dtype=torch.uint8) for data in (bytearray(record), received))
        work = _guarded(lambda: torch_private.allgather(self._group, out, x), "allgather", self)

        def ends(seconds: float) -> bool:
            if not polled(work.is_completed, seconds):
                return False
            _guarded(lambda: work.wait(FOR_EVER), "allgather", self)
            return True

        return ends

    def split(self, color: int, key: int) -> Backend:
        everybody = self.gather_objects((color, key))
        members = sorted((k, rank) for rank, (c, k) in enumerate(everybody) if c == color)
        name = f"{self._prefix}/{self._splits}.{color}"
        self._splits += 1
        return GlooBackend(
            self._connections, name, members.index((key, self.rank)), len(members), self.node
        )  # fmt: skip

    def abort(self, code: int) -> None:
        if self._connections is not None:
            self._connections.end(code)
        os._exit(code)

    def close(self) -> None:
        """End the group.

        A thread that receives messages from any rank ends with the process, because gloo cannot cancel a
        receive.
        """
        self._group = None
        self._outbox.close(PARTING)
        self._inbox.fail(PeerLost(f"{self.name} has been closed"))

    def _connected(self, connections: Connections) -> Any:
        store = distributed().PrefixStore(self._prefix, connections.client())
        limit = timedelta(seconds=connections.patience)
        group = distributed().ProcessGroupGloo(store, self.rank, self.size, limit)
        torch_private.set_timeout_of_group(group, FOR_EVER)
        return group

    def _allreduce_in_shares(self, x: Tensor, reduction: Reduction) -> None:
        share = -(-x.numel() // self.size)
        whole = x.view(-1)
        if share * self.size > x.numel():
            whole = torch.cat([whole, x.new_zeros(share * self.size - x.numel())])
        mine = x.new_empty(share)
        self.reduce_scatter(mine, whole, reduction)
        self.allgather(whole, mine)
        if whole.data_ptr() != x.data_ptr():
            x.view(-1).copy_(whole[: x.numel()])

    def _messages(
        self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor], tag: int, what: str
    ) -> None:  # fmt: skip
        """Exchange messages with other ranks, all at once.

        Empty messages are skipped, because the receiver knows their size.
        """

        def begun() -> list[Any]:
            works = [self._group.recv([as_bytes(x)], i, tag) for i, x in recv.items() if x.numel()]
            return works + [self._group.send([as_bytes(x)], i, tag) for i, x in send.items() if x.numel()]

        for work in _guarded(begun, what, self):
            _guarded(lambda work=work: work.wait(FOR_EVER), what, self)

    def _open(self, out: Tensor, source: int) -> int:
        sender, x = self._inbox.take(source)
        if x.nbytes != out.nbytes:
            raise ValueError(f"{x.nbytes} bytes from rank {sender} into {out.nbytes}")
        as_bytes(out).copy_(as_bytes(x))
        return sender

    def _collect(self, like: Tensor) -> None:
        """Start a thread that receives all messages of other ranks, each as long as `like`.

        The thread is needed because gloo can neither cancel a receive nor receive from the rank itself.
        """

        def collect() -> None:
            group = self._group
            while True:
                room = torch.empty_like(like)
                try:
                    work = group.recv_anysource([room], _ASKED)
                    work.wait(FOR_EVER)
                except RuntimeError as error:
                    self._inbox.fail(_lost(error, "recv", self))
                    return
                self._inbox.put(torch_private.source_of_message(work), room)

        self._collector = threading.Thread(target=collect, name=f"inbox of {self._prefix}", daemon=True)
        self._collector.start()

    def _complete(self, what: str, begin: Callable[[], Any]) -> None:
        _guarded(lambda: begin().wait(FOR_EVER), what, self)


def _guarded(call: Callable[[], Any], what: str, ranks: GlooBackend) -> Any:
    try:
        return call()
    except RuntimeError as error:
        raise _lost(error, what, ranks) from error


def _lost(error: RuntimeError, what: str, ranks: GlooBackend) -> PeerLost:
    """Return a `PeerLost` with the text of `error` without gloo's source locations and guess at a cause."""
    cause = re.sub(r"\[\S*\.(?:cc|cpp|h):\d+\] ", "", first_line(error)).split(". This", 1)[0]
    return PeerLost(f"{what} over {ranks.size} ranks by {ranks.name}: {cause}")
