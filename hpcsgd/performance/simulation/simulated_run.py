"""One simulated run as rules see it: what it is made of, and what becomes of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.random import Generator

from hpcsgd.performance.simulation.compute import Compute, Seconds
from hpcsgd.performance.simulation.durations import Durations, Layout, Message
from hpcsgd.performance.simulation.failures import Failures
from hpcsgd.performance.simulation.links import Indices, Links
from hpcsgd.performance.simulation.rank_times import RankTimes


class SimulatedRun:
    """T steps of every group. A rule says when each of them ends, by `made`."""

    def __init__(
        self, compute: Compute, durations: Durations, T: int, failures: Failures | None = None
    ) -> None:
        self.layout: Layout = compute.layout
        self.compute = compute
        self.durations = durations if compute.layout.P > 1 else replace(durations, message=Message())
        self.T = T
        self.failures = failures
        self.stats = RankTimes(T)
        self.ended = np.zeros(self.layout.P)
        """When each group made its last step so far."""
        self.first, self.start = 0, 0.0
        """The step with which it begins, counted from 0, and when that is."""
        self.under_way = 0.0
        """When all results are there which no step has used yet."""

    def part(self, first: int, T: int, start: float) -> SimulatedRun:
        """Steps from `first` up to T of the same run, which all groups begin at `start`."""
        part = copy.copy(self)
        part.first, part.T, part.start, part.under_way = first, T, start, 0.0
        return part

    def work(self, t: int) -> Seconds:
        """Seconds of each group from the beginning of step `t` to where it meets or sends: (P,)."""
        mean, longest = self.drawn(t)
        self.computed(t, mean, longest)
        return longest + self.durations.before_sync

    def drawn(self, t: int) -> tuple[Seconds, Seconds]:
        """What the ranks of each group compute in step `t`: the mean of them and the longest, (P,)."""
        seconds = self.compute.seconds(t)
        longest = seconds.max(axis=1)
        return (seconds.mean(axis=1) if self.layout.K > 1 else longest), longest

    def computed(self, t: int, mean: Seconds, longest: Seconds) -> None:
        """These groups did."""
        self.stats.add("compute", t, mean)
        self.stats.add("in the group", t, longest - mean)
        for cause in ("exchange", "update"):
            self.stats.add(cause, t, getattr(self.durations, cause) * len(mean))

    def generator(self, what: str) -> Generator:
        """Chance of this run for `what` is not that of its seconds."""
        return Generator(np.random.SFC64([self.compute.seed, *what.encode()]))

    def made(self, steps: Indices | int, groups: Indices | slice, times: Seconds) -> None:
        """These groups have made these steps at these times."""
        self.stats.add("gather", steps, np.full(len(times), self.durations.gather))
        self.stats.finished(steps, times)
        self.ended[groups] = times

    def links(self) -> Links:
        """The way out of each host."""
        return Links(-(-self.layout.P // self.layout.groups_on_a_host), self.durations.message.link)

    def host(self, groups: Indices) -> Indices:
        return groups // self.layout.groups_on_a_host


class Table:
    """`Course.work` of any group and step, drawn when the first comes to it and kept until the last one has
    been: a ring of rows, which grows with the steps that are between them."""

    def __init__(self, course: SimulatedRun) -> None:
        self._run = course
        self._rows = np.empty((4, course.layout.P))
        self._oldest = self._drawn = course.first
        self._told = np.zeros(course.T, int)

    def __call__(self, groups: Indices, steps: Indices) -> Seconds:
        """Infinite after the last step. Everybody asks for each step once."""
        T, P = self._run.T, self._run.layout.P
        for t in range(self._drawn, min(int(steps.max(initial=-1)) + 1, T)):
            self._draw(t)
        there = steps < T
        told = np.full(len(groups), np.inf)
        told[there] = self._rows[steps[there] % len(self._rows), groups[there]]
        self._told += np.bincount(steps[there], minlength=T)
        while self._oldest < self._drawn and self._told[self._oldest] == P:
            self._oldest += 1
        return told

    def _draw(self, t: int) -> None:
        size = len(self._rows)
        if t - self._oldest == size:
            kept = np.arange(self._oldest, t)
            rows = np.empty((2 * size, self._run.layout.P))
            rows[kept % (2 * size)] = self._rows[kept % size]
            self._rows = rows
        self._rows[t % len(self._rows)] = self._run.work(t)
        self._drawn = t + 1


@runtime_checkable
class Rule(Protocol):
    """When groups wait for each other."""

    @property
    def dies_as_one(self) -> bool:
        """Whether a rank that fails takes the whole job with it."""
        ...

    def run(self, course: SimulatedRun) -> None:
        """All steps of all groups, from the first one of the course on."""
        ...
