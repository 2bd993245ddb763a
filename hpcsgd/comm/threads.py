"""N ranks as N threads of one process, so that every method can be tested without a launcher."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpcsgd.comm.backend import ANY, Backend, Ending, PeerLost, Reduction
from hpcsgd.comm.by_device import ByDevice
from hpcsgd.comm.comm_thread import know_processor
from hpcsgd.comm.communicator import Communicator
from hpcsgd.comm.deadlock import Table
from hpcsgd.comm.rank_watch import WORLD, Member, RankWatch
from hpcsgd.comm.sums import reduced

Result = TypeVar("Result")


class Rendezvous:
    """Shared memory of the ranks of one communicator, through which they exchange operands."""

    def __init__(self, size: int, timeout: float, all_rendezvous: list[Rendezvous]) -> None:
        self.size = size
        self.timeout = timeout
        self.all_rendezvous = all_rendezvous
        self.slots: list[Any] = [None] * size
        self.arrivals = [0] * size
        self.barrier = threading.Barrier(size)
        self.post = threading.Condition()
        self.posted = [0] * size
        self.records: dict[int, dict[int, bytes]] = {}
        """The records of operations that some ranks have not posted yet, by the operation's number."""
        self.inboxes: list[list[tuple[int, Tensor]]] = [[] for _ in range(size)]
        self.broken = False
        all_rendezvous.append(self)

    def together(self, rank: int, what: str, item: Any, read: Callable[[list[Any]], Any]) -> Any:
        """Publish `item`, wait for all ranks, and return `read(items)` after all ranks have read."""
        self.slots[rank] = (what, item)
        self._await_all(rank, what)
        asked = {operation for operation, _ in self.slots}
        assert len(asked) == 1, f"ranks are in different operations: {sorted(asked)}"
        result = read([item for _, item in self.slots])
        self._await_all(rank, what)
        self.slots[rank] = None  # otherwise the item would stay alive until the next operation
        return result

    def post_record(self, rank: int, record: bytes) -> dict[int, bytes]:
        """Store `record`, and return the dict that will hold the records of all ranks."""
        with self.post:
            number = self.posted[rank]
            self.posted[rank] += 1
            records = self.records.setdefault(number, {})
            records[rank] = record
            if len(records) == self.size:
                del self.records[number]
                self.post.notify_all()
            return records

    def wait_for_records(self, records: dict[int, bytes], seconds: float) -> bool:
        """Wait at most `seconds` until `records` has those of all ranks, and return whether it has."""
        with self.post:
            limit = None if math.isinf(seconds) else seconds
            self.post.wait_for(lambda: self.broken or len(records) == self.size, limit)
            missing = [rank for rank in range(self.size) if rank not in records]
        if missing and self.broken:
            raise PeerLost(f"ranks {missing} did not come", missing)
        return not missing

    def wait_for_message(self, rank: int, source: int) -> tuple[int, Tensor]:
        def waiting() -> int | None:
            inboxes = self.inboxes[rank]
            return next((i for i, (sender, _) in enumerate(inboxes) if source in (ANY, sender)), None)

        with self.post:
            arrived = self.post.wait_for(lambda: self.broken or waiting() is not None, self.timeout)
            place = waiting()
            if not arrived or place is None:
                raise PeerLost(f"recv: no message from {source} within {self.timeout:g} s", (source,))
            return self.inboxes[rank].pop(place)

    def abort(self) -> None:
        self.barrier.abort()
        with self.post:
            self.broken = True
            self.post.notify_all()

    def _await_all(self, rank: int, what: str) -> None:
        self.arrivals[rank] += 1
        try:
            self.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            missing = tuple(i for i, n in enumerate(self.arrivals) if n < self.arrivals[rank])
            lost = f"ranks {list(missing)} did not come" if missing else "a rank ended by an error"
            raise PeerLost(f"{what}: {lost}", missing) from None


class ThreadBackend(Backend):
    """The backend of one rank that is a thread. Sums are in rank order, in float32 for 16-bit floats."""

    name = "threads"

    def __init__(self, rank: int, rendezvous: Rendezvous, node: int) -> None:
        self.rank = rank
        self.size = rendezvous.size
        self.node = node
        self._rendezvous = rendezvous

    @property
    def host(self) -> Backend:
        return self

    def accepts(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def alltoall(self, out: Tensor, x: Tensor) -> None:
        def read(xs: list[Tensor]) -> None:
            for mine, theirs in zip(out.view(self.size, -1), xs, strict=True):
                mine.copy_(theirs.view(self.size, -1)[self.rank])

        self._rendezvous.together(self.rank, "alltoall", x, read)

    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: Reduction) -> None:
        def read(xs: list[Tensor]) -> None:
            out.copy_(reduced([x.view(self.size, -1)[self.rank] for x in xs], reduction).view_as(out))

        self._rendezvous.together(self.rank, f"reduce_scatter {reduction}", x, read)

    def allgather(self, out: Tensor, x: Tensor) -> None:
        def read(xs: list[Tensor]) -> None:
            for run, theirs in zip(out.view(self.size, -1), xs, strict=True):
                if run.data_ptr() != theirs.data_ptr():
                    run.copy_(theirs.view(-1))

        self._rendezvous.together(self.rank, "allgather", x, read)

    def allgatherv(self, out: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        self._rendezvous.together(
            self.rank, "allgatherv", x, lambda xs: torch.cat(_flat(xs), out=out.view(-1))
        )

    def allreduce(self, x: Tensor, reduction: Reduction) -> None:
        what = f"allreduce {reduction}"
        result = self._rendezvous.together(self.rank, what, x, lambda xs: reduced(xs, reduction))
        x.copy_(result)

    def bcast(self, x: Tensor, root: int) -> None:
        def read(xs: list[Tensor]) -> None:
            if self.rank != root:
                x.copy_(xs[root])

        self._rendezvous.together(self.rank, f"bcast from {root}", x, read)

    def sendrecv(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> None:
        for to, x in send.items():
            self.send(x, to)
        for source, out in recv.items():
            self.recv(out, source)

    def send(self, x: Tensor, to: int) -> None:
        with self._rendezvous.post:
            self._rendezvous.inboxes[to].append((self.rank, x.clone()))
            self._rendezvous.post.notify_all()

    def recv(self, out: Tensor, source: int) -> int:
        sender, x = self._rendezvous.wait_for_message(self.rank, source)
        out.copy_(x)
        return sender

    def gather_objects(self, item: Any) -> list[Any]:
        return self._rendezvous.together(
            self.rank, "gather_objects", pickle.dumps(item), lambda items: [pickle.loads(i) for i in items]
        )

    def post_record(self, record: bytes, received: bytearray) -> Ending:
        records = self._rendezvous.post_record(self.rank, record)

        def ends(seconds: float) -> bool:
            if not self._rendezvous.wait_for_records(records, seconds):
                return False
            received[:] = b"".join(records[rank] for rank in range(self.size))
            return True

        return ends

    def split(self, color: int, key: int) -> Backend:
        place = (key, self.rank)
        everyone = self._rendezvous.together(self.rank, "split", (color, place), list)
        members = sorted(place for theirs, place in everyone if theirs == color)
        rendezvous = None
        if place == members[0]:
            rendezvous = Rendezvous(len(members), self._rendezvous.timeout, self._rendezvous.all_rendezvous)
        leaders = self._rendezvous.together(self.rank, "split", rendezvous, list)
        return ThreadBackend(members.index(place), leaders[members[0][1]], self.node)

    def abort(self, code: int) -> None:
        for rendezvous in list(self._rendezvous.all_rendezvous):
            rendezvous.abort()


def run(
    n: int,
    function: Callable[..., Result],
    *args: Any,
    nodes: Sequence[int] | None = None,
    timeout: float = 60.0,
    wrap: Callable[[Backend], Backend] = lambda backend: backend,
) -> list[Result]:
    """Run `function(world, *args)` on `n` ranks, and return their results in rank order.

    Rank r behaves as if it were on node `nodes[r]`; `wrap` decorates each rank's backend. If ranks raise,
    the first exception that is not just the loss of another rank is raised here.
    """
    know_processor()
    reports = Table()
    # The rendezvous has a shorter timeout than `Work`, because it can name the missing ranks.
    rendezvous = Rendezvous(n, 0.8 * timeout, [])
    results: list[Any] = [None] * n
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        backend = wrap(ByDevice(ThreadBackend(rank, rendezvous, nodes[rank] if nodes else 0)))
        watch = RankWatch(rank, reports) if n > 1 else None
        member = watch and Member(watch, WORLD, range(n))
        world = Communicator(backend, timeout=timeout, member=member)
        ended = False
        try:
            results[rank] = function(world, *args)
            if watch is not None:
                watch.leaving = True
            ended = world.close_dups(timeout)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            backend.abort(1)
        finally:
            if world.comm_thread.close(timeout) and ended and watch is not None:
                watch.left()

    ranks = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(n)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerLost)), errors[0])
    return results


def _flat(xs: Sequence[Tensor]) -> list[Tensor]:
    return [x.view(-1) for x in xs]
