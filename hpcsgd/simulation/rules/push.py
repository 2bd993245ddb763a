"""Gossip over a graph: a step ends when the messages of the in-neighbours are there.

M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019,
algorithm 1 and τ-overlap: what was sent at the end of step t is needed at the end of step t + τ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcsgd.core.graphs import Exponential, Graph, Ring
from hpcsgd.errors import UserError
from hpcsgd.simulation.compute import Seconds
from hpcsgd.simulation.course import Course
from hpcsgd.simulation.links import Indices
from hpcsgd.simulation.traffic import Traffic
from hpcsgd.simulation.windows import in_windows


@dataclass(frozen=True)
class Push:
    """Over `graph`, messages `staleness` (τ) steps late. A message is all that a group sends in a step."""

    graph: Graph
    staleness: int = 0
    dies_as_one = True

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise UserError(
                f"staleness = {self.staleness}: messages are used 0 or more steps after they were sent"
            )

    def messages(self, P: int) -> float:
        return 1.0

    def traffic(self) -> Traffic:
        return Traffic(graph=self.graph, lag=self.staleness, own_lag=self.staleness)

    def run(self, course: Course) -> None:
        in_windows(course, _Arrivals(self.graph, self.staleness, course.layout.P))


def sgp(peers: int | None = None, graph: Graph | None = None) -> Push:
    """As `hpcsgd.sgp`."""
    return osgp(0, peers, graph)


def osgp(staleness: int, peers: int | None = None, graph: Graph | None = None) -> Push:
    """As `hpcsgd.osgp`."""
    if graph is not None and peers is not None:
        raise UserError(f"peers = {peers} and a graph: peers is of the exponential graph, give one of them")
    return Push(graph or Exponential(1 if peers is None else peers), staleness)


def d_psgd(graph: Graph | None = None) -> Push:
    """As `hpcsgd.d_psgd`: a graph whose edges go both ways."""
    graph = graph or Ring()
    if not graph.symmetric:
        raise UserError(f"graph = {graph}: d_psgd needs one whose edges go both ways")
    return Push(graph)


class _Edges:
    """Of the graph in one step: who sends to whom, in the order of the senders."""

    def __init__(self, graph: Graph, t: int, P: int) -> None:
        peers = [graph.peers(i, t, P) for i in range(P)]
        self._to = np.array([j for those in peers for j in those], np.intp)
        self._start = np.cumsum([0, *map(len, peers)])
        self.senders = np.bincount(self._to, minlength=P)
        """How many send to each."""

    def of(self, groups: Indices) -> tuple[Indices, Indices]:
        """The ends of the edges that begin at `groups`, and the place in `groups` where each begins."""
        count = self._start[groups + 1] - self._start[groups]
        begins = np.repeat(np.arange(len(groups)), count)
        within = np.arange(len(begins)) - np.repeat(np.cumsum(count) - count, count)
        return self._to[self._start[groups][begins] + within], begins


@dataclass
class _Round:
    """The messages of one step: how many each group still misses, and when the last one was there."""

    missing: NDArray[np.intp]
    last: Seconds
    used: int = 0


class _Arrivals:
    def __init__(self, graph: Graph, staleness: int, P: int) -> None:
        self.staleness = staleness
        self._edges = [_Edges(graph, t, P) for t in range(graph.period(P))]
        self._P = P
        self._rounds: dict[int, _Round] = {}

    def deliver(self, groups: Indices, steps: Indices, times: Seconds) -> None:
        for t in np.unique(steps).tolist():
            here = steps == t
            to, begins = self._edges[t % len(self._edges)].of(groups[here])
            round_ = self._round(t)
            np.subtract.at(round_.missing, to, 1)
            np.maximum.at(round_.last, to, times[here][begins])

    def there(self, groups: Indices, steps: Indices) -> Seconds:
        there = np.full(len(groups), -np.inf)
        for t in np.unique(steps[steps >= self.staleness]).tolist():
            here = np.flatnonzero(steps == t)
            sent = t - self.staleness
            round_ = self._round(sent)
            known = round_.missing[groups[here]] == 0
            there[here] = np.where(known, round_.last[groups[here]], np.inf)
            round_.used += int(np.count_nonzero(known))  # who knows goes on, and does not ask again
            if round_.used == self._P:
                del self._rounds[sent]
        return there

    def _round(self, t: int) -> _Round:
        if t not in self._rounds:
            senders = self._edges[t % len(self._edges)].senders
            self._rounds[t] = _Round(senders.copy(), np.full(self._P, -np.inf))
        return self._rounds[t]
