"""One simulated run: the inputs for a rule, and the results that the rule records."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.random import Generator

from hpcsgd.performance.simulation.compute import Compute, Seconds
from hpcsgd.performance.simulation.durations import Durations, Layout, Message
from hpcsgd.performance.simulation.failures import Failures
from hpcsgd.performance.simulation.links import Indices, Links
from hpcsgd.performance.simulation.rank_times import RankTimes


@dataclass(frozen=True)
class SyncRecord:
    """A synchronization from which groups may be left out."""

    t: int
    """The number of steps that each member counts as done after the synchronization."""
    begin: float
    end: float
    """The times at which the average began and ended."""
    members: tuple[int, ...]
    """The groups that get the average."""
    counted: tuple[int, ...]
    """The groups whose models are averaged."""


class SimulatedRun:
    """A simulated run of T steps of every group. A rule calls `made` to record when each step ends."""

    def __init__(
        self,
        compute: Compute,
        durations: Durations,
        T: int,
        failures: Failures | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.layout: Layout = compute.layout
        self.compute = compute
        self.durations = durations if compute.layout.P > 1 else replace(durations, message=Message())
        self.T = T
        self.failures, self.steps_per_epoch = failures, steps_per_epoch
        self.stats = RankTimes(T)
        self.ended = np.zeros(self.layout.P)
        """The time at which each group ended its last step so far."""
        self.first, self.start = 0, 0.0
        """The first step of the run, counted from 0, and the time at which it begins."""
        self.under_way = 0.0
        """The time at which the averages that no step has used yet are all done; 0 without such averages."""
        self.syncs: list[SyncRecord] = []
        """All synchronizations, if groups may be left out of them."""

    def part(self, first: int, T: int, start: float) -> SimulatedRun:
        """Return the part of this run with steps `first` to T − 1, which all groups begin at time `start`."""
        part = copy.copy(self)
        part.first, part.T, part.start, part.under_way = first, T, start, 0.0
        return part

    def work(self, t: int) -> Seconds:
        """Return each group's seconds from the start of step `t` until it averages or sends, as (P,)."""
        mean, longest = self.drawn(t)
        self.computed(t, mean, longest)
        return longest + self.durations.before_sync

    def drawn(self, t: int) -> tuple[Seconds, Seconds]:
        """Return the mean and the longest compute seconds of each group's ranks in step `t`, as (P,) each."""
        seconds = self.compute.seconds(t)
        longest = seconds.max(axis=1)
        return (seconds.mean(axis=1) if self.layout.K > 1 else longest), longest

    def computed(self, t: int, mean: Seconds, longest: Seconds) -> None:
        """Record the compute seconds of the groups that made step `t`."""
        self.stats.add("compute", t, mean)
        self.stats.add("in the group", t, longest - mean)
        for cause in ("grad_reduce", "update"):
            self.stats.add(cause, t, getattr(self.durations, cause) * len(mean))

    def generator(self, what: str) -> Generator:
        """Return a generator of random numbers for `what`, independent of the compute seconds."""
        return Generator(np.random.SFC64([self.compute.seed, *what.encode()]))

    def made(self, steps: Indices | int, groups: Indices | slice, times: Seconds) -> None:
        """Record that `groups` ended `steps` at `times`."""
        self.stats.add("gather", steps, np.full(len(times), self.durations.gather))
        self.stats.finished(steps, times)
        self.ended[groups] = times

    def links(self) -> Links:
        """Return the outgoing links of all hosts."""
        return Links(-(-self.layout.P // self.layout.groups_on_a_host), self.durations.message.link)

    def host(self, groups: Indices) -> Indices:
        return groups // self.layout.groups_on_a_host


class Table:
    """A cache of the seconds that `SimulatedRun.work` draws, for groups that are in different steps.

    The seconds of a step are drawn when the first group reaches the step, and kept until the last group has
    read them. The rows of the cache are a ring buffer: a new step overwrites the row of a step that all
    groups have read. If there is no such row, the number of rows doubles.
    """

    def __init__(self, course: SimulatedRun) -> None:
        self._run = course
        self._rows = np.empty((4, course.layout.P))
        self._oldest = self._drawn = course.first
        self._reported = np.zeros(course.T, int)

    def __call__(self, groups: Indices, steps: Indices) -> Seconds:
        """Return for each i the seconds of group `groups[i]` in step `steps[i]`.

        They are infinite if the run has no such step. Each group must read each step exactly once.
        """
        T, P = self._run.T, self._run.layout.P
        for t in range(self._drawn, min(int(steps.max(initial=-1)) + 1, T)):
            self._draw(t)
        there = steps < T
        found = np.full(len(groups), np.inf)
        found[there] = self._rows[steps[there] % len(self._rows), groups[there]]
        self._reported += np.bincount(steps[there], minlength=T)
        while self._oldest < self._drawn and self._reported[self._oldest] == P:
            self._oldest += 1
        return found

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
    """A rule that says when groups wait for each other, and simulates a run accordingly."""

    @property
    def dies_as_one(self) -> bool:
        """True if the failure of one rank ends the whole job, and not only the group of this rank."""
        ...

    def run(self, course: SimulatedRun) -> None:
        """Simulate all steps of all groups, from the first step of `course` on."""
        ...
