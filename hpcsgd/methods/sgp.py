"""Stochastic gradient push: groups gossip over a directed graph, and nobody waits for the whole job.

M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019,
algorithm 1. Node i holds a biased x_i, a weight w_i, at first 1, and z_i = x_i / w_i, and in every step

    1  computes its gradient at z_i
    2  updates x_i by it (SGD, momentum, Adam: the moments stay local)
    3  sends p_ji·x_i and p_ji·w_i to its out-neighbours j, and keeps p_ii of both
    4  x_i ← Σ_j p_ij·x_j,  w_i ← Σ_j p_ij·w_j,  z_i ← x_i / w_i

The paper's node is a group here, and each of its K positions gossips the chunk that it owns: M/K a link.
The model's parameters are z_i. Weight decay acts on x_i. Over the graphs of the paper every w_i stays 1; it
travels all the same, since a graph that is not regular, or a message that is late, changes it.
"""

from __future__ import annotations

from typing import Any

from hpcsgd.averagers.parcel import Parcel
from hpcsgd.errors import UserError
from hpcsgd.exchanges import AllToAll
from hpcsgd.graphs import Exponential, Graph, senders
from hpcsgd.schedules import Every
from hpcsgd.step import Exchange, Method, Step


class PushSum:
    """Lines 2 to 4 beside the optimizer's update: x ← P_t x, w ← P_t w with a column-stochastic P_t."""

    shards = True

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.weight = 1.0
        """w_i of this group."""
        self._sent: Parcel | None = None
        self._received: list[Parcel] = []

    def before_update(self, s: Step) -> None:
        """What is updated is x_i = w_i·z_i."""
        if self.weight != 1:
            for b in s.buckets:
                b.w.mul_(self.weight)

    def __call__(self, s: Step) -> None:
        t, i, n = s.t - 1, s.job.g, s.job.P
        peers, sources = self.graph.peers(i, t, n), senders(self.graph, i, t, n)
        share = 1 / (len(peers) + 1)
        parcel, arrived = self._room(s, len(sources))
        parcel.pack(s.buckets, share, self.weight)
        incoming = {j: room.bytes for j, room in zip(sources, arrived, strict=True)}
        s.job.cross.exchange(dict.fromkeys(peers, parcel.bytes), incoming).wait()
        for b, chunk in zip(s.buckets, parcel.chunks, strict=True):
            b.own.copy_(chunk)
        self.weight = parcel.weight
        for theirs in arrived:
            theirs.add_to(s.buckets)
            self.weight += theirs.weight
        if self.weight != 1:
            for b in s.buckets:
                b.own.div_(self.weight)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]

    def _room(self, s: Step, arriving: int) -> tuple[Parcel, list[Parcel]]:
        self._sent = self._sent or Parcel(s.buckets)
        self._received += [Parcel(s.buckets) for _ in range(arriving - len(self._received))]
        return self._sent, self._received[:arriving]


def sgp(
    peers: int | None = None,
    graph: Graph | None = None,
    exchange: Exchange = AllToAll(),  # noqa: B008 - frozen
) -> Method:
    """Push-sum gossip after every step, over the directed exponential graph with `peers` at a time (1), or
    over another `graph`. A group sends `peers`·M/K elements a rank and step."""
    if graph is not None and peers is not None:
        raise UserError(f"peers = {peers} and a graph: peers is of the exponential graph, give one of them")
    return Method(
        exchange=exchange, when=Every(1), how=PushSum(graph or Exponential(1 if peers is None else peers))
    )
