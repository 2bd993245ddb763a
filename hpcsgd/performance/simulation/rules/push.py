"""Groups send messages to some other groups, and end a step when the messages to them have arrived.

M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019,
algorithm 1 and τ-overlap: messages sent at the end of step t are needed at the end of step t + τ. A graph or
random pairs determine which group sends to which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hpcsgd.core.graphs import Graph
from hpcsgd.core.waits import Pairs, Period, due
from hpcsgd.performance.simulation.compute import Seconds
from hpcsgd.performance.simulation.links import Indices
from hpcsgd.performance.simulation.simulated_run import SimulatedRun
from hpcsgd.performance.simulation.windows import in_windows


@dataclass(frozen=True)
class Push:
    """The rule of messages over `graph` after every `period` steps, used `staleness` (τ) steps later.

    One message stands for all messages that a group sends in a step.
    """

    graph: Graph
    staleness: int = 0
    period: Period = 1
    dies_as_one = True

    def run(self, course: SimulatedRun) -> None:
        P = course.layout.P
        steps = range(self.graph.period(P))
        edges = [_Edges([self.graph.peers(i, t, P) for i in range(P)]) for t in steps]
        always = self.period == 1 and all(each.begin_at(np.arange(P)).all() for each in edges)
        arrivals = _Arrivals(
            lambda t: edges[t % len(edges)], self.staleness, self.period, course, always=always
        )
        in_windows(course, arrivals)


@dataclass(frozen=True)
class Paired:
    """The rule of messages between the two groups of each random pair, after every `period` steps."""

    pairs: Pairs
    period: Period
    dies_as_one = True

    def run(self, course: SimulatedRun) -> None:
        edges = partial(self._edges, course.layout.P)
        in_windows(course, _Arrivals(edges, self.pairs.late, self.period, course))

    def _edges(self, P: int, t: int) -> _Edges:
        partners = self.pairs.partners(t + 1, P)
        return _Edges([[partners[g]] if g in partners else [] for g in range(P)])


class _Edges:
    """The edges of one step from senders to receivers, ordered by sender."""

    def __init__(self, peers: Sequence[Sequence[int]]) -> None:
        """Build the edges. `peers`: the groups to which each group sends."""
        self._to = np.array([j for those in peers for j in those], np.intp)
        self._start = np.cumsum([0, *map(len, peers)])
        self.senders = np.bincount(self._to, minlength=len(peers))
        """For each group, the number of groups that send to it."""

    def begin_at(self, groups: Indices) -> NDArray[np.bool_]:
        """Return, for each of `groups`, whether it sends to any group."""
        return self._start[groups + 1] > self._start[groups]

    def of(self, groups: Indices) -> tuple[Indices, Indices]:
        """Return the receivers of the edges that begin at `groups`, and each edge's index into `groups`."""
        count = self._start[groups + 1] - self._start[groups]
        begins = np.repeat(np.arange(len(groups)), count)
        within = np.arange(len(begins)) - np.repeat(np.cumsum(count) - count, count)
        return self._to[self._start[groups][begins] + within], begins


class _Round:
    """The messages of one step: how many each group still waits for, and when its last message arrived."""

    def __init__(self, edges: _Edges) -> None:
        self.edges = edges
        self.missing = edges.senders.copy()
        self.last = np.full(len(edges.senders), -np.inf)
        self.used = 0


class _Arrivals:
    """The `Inbox` of messages over edges: which messages have arrived at which group."""

    def __init__(
        self,
        edges: Callable[[int], _Edges],
        staleness: int,
        period: Period,
        course: SimulatedRun,
        *,
        always: bool = False,
    ) -> None:
        """Create an empty inbox. `edges` returns the edges of a step, counted from 0."""
        self.staleness, self.always = staleness, always
        self._edges, self._period, self._course = edges, period, course
        self._rounds: dict[int, _Round] = {}

    def sending(self, groups: Indices, steps: Indices) -> Indices:
        sends = np.zeros(len(groups), bool)
        for t in np.unique(steps[due(steps + 1, self._period)]).tolist():
            here = steps == t
            sends[here] = self._round(t).edges.begin_at(groups[here])
        return np.flatnonzero(sends)

    def deliver(self, groups: Indices, steps: Indices, times: Seconds) -> None:
        for t in np.unique(steps).tolist():
            here, round_ = steps == t, self._round(t)
            to, begins = round_.edges.of(groups[here])
            np.subtract.at(round_.missing, to, 1)
            np.maximum.at(round_.last, to, times[here][begins])

    def there(self, groups: Indices, steps: Indices) -> Seconds:
        there = np.full(len(groups), -np.inf)
        sent = steps - self.staleness
        for t in np.unique(sent[(sent >= self._course.first) & due(sent + 1, self._period)]).tolist():
            here = np.flatnonzero(sent == t)
            round_ = self._round(t)
            known = round_.missing[groups[here]] == 0
            there[here] = np.where(known, round_.last[groups[here]], np.inf)
            round_.used += int(np.count_nonzero(known))  # these groups go on and do not need the round again
            if round_.used == self._course.layout.P:
                del self._rounds[t]
        return there

    def _round(self, t: int) -> _Round:
        if t not in self._rounds:
            self._rounds[t] = _Round(self._edges(t))
        return self._rounds[t]
