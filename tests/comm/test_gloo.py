"""Tests of the backend for ranks without MPI, here on threads; `test_torchrun.py` has those on processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hpcsgd.comm import Communicator, threads
from hpcsgd.comm.gloo import GlooBackend
from hpcsgd.comm.process_group import distributed


class InOneProcess:
    """A stand-in for `Connections` of ranks that are threads of one process."""

    patience = 60.0

    def __init__(self) -> None:
        self._store = distributed().HashStore()

    def client(self) -> Any:
        return self._store

    def add(self, group: GlooBackend) -> None:
        pass


def by_gloo(n: int, call: Callable[[GlooBackend], Any]) -> list[Any]:
    """Return what `call` returns on each of n ranks."""
    connections: Any = InOneProcess()

    def of_rank(world: Communicator) -> Any:
        ranks = GlooBackend(connections, "ranks", world.rank, world.size, node=0)
        result = call(ranks)
        world.barrier()  # a rank that closes ends the messages of others
        ranks.close()
        return result

    return threads.run(n, of_rank)


def test_parts_of_any_size_are_gathered_with_ones_own() -> None:
    counts = [3, 0, 2]

    def gather(ranks: GlooBackend) -> list[float]:
        out = torch.zeros(5)
        ranks.allgatherv(out, torch.full((counts[ranks.rank],), 1.0 + ranks.rank), counts)
        return out.tolist()

    assert by_gloo(3, gather) == [[1, 1, 1, 3, 3]] * 3


def test_messages_to_itself_and_to_others() -> None:
    """A rank can send to itself before it receives; gloo cannot."""

    def talk(ranks: GlooBackend) -> tuple[float, list[float]]:
        own, x = torch.zeros(1), torch.tensor([1.0 + ranks.rank])
        ranks.send(x, ranks.rank)
        x.neg_()  # the message has been sent
        ranks.recv(own, ranks.rank)
        received = [torch.zeros(1) for _ in range(ranks.size)]
        ranks.sendrecv(dict.fromkeys(range(ranks.size), x), dict(enumerate(received)))
        return own.item(), torch.cat(received).tolist()

    assert by_gloo(3, talk) == [(1.0 + rank, [-1, -2, -3]) for rank in range(3)]
