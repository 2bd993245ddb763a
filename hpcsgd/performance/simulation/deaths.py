"""Draw the random times at which elastic groups die, because a node or one of their ranks fails."""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np

from hpcsgd.performance.simulation.compute import Seconds
from hpcsgd.performance.simulation.links import Indices
from hpcsgd.performance.simulation.simulated_run import SimulatedRun


class Deaths:
    """The deaths of all groups of a simulated run. Groups that share a node die with it together."""

    def __init__(self, course: SimulatedRun) -> None:
        layout, self._run, self._failures = course.layout, course, course.failures
        self._chance = course.generator("deaths")
        nodes = math.ceil(layout.K / layout.ranks_per_host)
        self._shared = self._failures is not None and layout.groups_on_a_host > 1
        self._life = math.inf
        """Mean seconds between failures of one group, by its ranks and by nodes that only this group uses."""
        if self._failures is not None:
            self._life = self._failures.mtbf(0 if self._shared else nodes, layout.K)
        self._of_nodes: dict[int, _Node] = {}

    def after(self, now: Seconds, groups: Indices) -> Seconds:
        """Return the time at which each of `groups` dies, if it starts or returns at its time in `now`.

        `now` and the result have one time for each of `groups`, in seconds from the beginning of the run. The
        time is infinite for a group that never dies.
        """
        dies = np.full(len(groups), np.inf)
        if math.isfinite(self._life):
            dies = now + self._chance.exponential(self._life, len(groups))
        if self._shared:
            nodes = self._run.host(groups)
            dies = np.minimum(
                dies, [self._node(int(node)).after(t) for node, t in zip(nodes, now, strict=True)]
            )
        return dies

    def _node(self, number: int) -> _Node:
        if number not in self._of_nodes:
            assert self._failures is not None
            self._of_nodes[number] = _Node(self._run, number, self._failures.mtbf_seconds)
        return self._of_nodes[number]


class _Node:
    """The random failure times of a node whose ranks fail together, drawn one after another."""

    def __init__(self, course: SimulatedRun, number: int, mtbf: float) -> None:
        self._chance, self._mtbf = course.generator(f"node {number}"), mtbf
        self._times = [0.0]

    def after(self, now: float) -> float:
        """Return the time of the first failure of this node after the time `now`."""
        while self._times[-1] <= now:
            self._times.append(self._times[-1] + self._chance.exponential(self._mtbf))
        return self._times[bisect_right(self._times, now)]
