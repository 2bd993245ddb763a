"""Groups that may die and return: EnsembleSync, as `hpcsgd launch` runs it.

Every T steps, and at the end of an epoch and of the run, the living groups synchronize. They wait for a dead
group until it has been silent for `Failures.heartbeat_timeout_seconds`. The dead group is restarted, and
joins the living groups at the end of an epoch. If no group is alive, all begin the epoch again as soon as one
group is back.

When a group dies, its work since the last synchronization is lost. A group has its own nodes, or shares one
node with other groups, all of which die with this node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcsgd.core.waits import Period, due, step_of_sync, syncs_after
from hpcsgd.errors import UserError
from hpcsgd.performance.simulation.compute import Seconds
from hpcsgd.performance.simulation.deaths import Deaths
from hpcsgd.performance.simulation.simulated_run import SimulatedRun

PATIENCE = 1000
"""The number of failed attempts at one epoch after which the simulation ends with an error."""


@dataclass(frozen=True)
class Ensemble:
    """The rule of EnsembleSync, which synchronizes after every `every` (T) steps."""

    every: Period
    dies_as_one = False

    def run(self, course: SimulatedRun) -> None:
        replica_groups = _ReplicaGroups(course)
        per_epoch = course.steps_per_epoch or course.T
        t = 0
        while t < course.T:
            epoch_began = t - t % per_epoch
            replica_groups.step(t, max(step_of_sync(syncs_after(t, self.every), self.every), epoch_began))
            if not replica_groups.alive.any():
                t = epoch_began
                replica_groups.begin_again(t)
                continue
            epoch_ends = (t + 1) % per_epoch == 0
            if epoch_ends or due(t + 1, self.every) or t + 1 == course.T:
                replica_groups.synchronize(t, epoch_ends=epoch_ends)
            replica_groups.end(t)
            t += 1
        replica_groups.close()


class _ReplicaGroups:
    """The state of the simulation: which groups are alive, and the time that each has reached."""

    def __init__(self, course: SimulatedRun) -> None:
        P, failures = course.layout.P, course.failures
        self._course = course
        self._heartbeat_timeout = failures.heartbeat_timeout_seconds if failures else 0.0
        self._restart = failures.restart_seconds if failures else 0.0
        self._deaths = Deaths(course)
        self.F = np.zeros(P)
        """The time that each group has reached; for a dead group, the end of its last step."""
        self.alive = np.ones(P, bool)
        self._unheard = -np.inf
        """The time until which living groups wait for groups that died since the last synchronization."""
        self._dies = np.full(P, np.inf)
        self._begin_life(self.alive, self.F)
        self._in_vain = np.zeros(course.T, int)
        """For each step, how often all groups have begun again at this step."""

    def step(self, t: int, round_began: int) -> None:
        """Simulate step `t` up to its synchronization, and mark the groups that die before that.

        `round_began` is the first step since the last synchronization.
        """
        mean, longest = self._course.drawn(t)
        ready = self.F + longest + self._course.durations.before_sync
        died = self.alive & (self._dies <= ready)
        self.alive &= ~died
        self._unheard = max(
            self._unheard, float((self._dies[died] + self._heartbeat_timeout).max(initial=-np.inf))
        )
        self._course.stats.lost[round_began:t] += np.count_nonzero(died)
        self._course.computed(t, mean[self.alive], longest[self.alive])
        self.F[self.alive] = ready[self.alive]

    def synchronize(self, t: int, epoch_ends: bool) -> None:
        stats, here = self._course.stats, self.F[self.alive]
        begin = max(here.max(), self._unheard)
        averaged = begin + (self._course.durations.model_average if len(here) > 1 else 0.0)
        stats.add("for other groups", t, here.max() - here)
        stats.add("failures", t, np.full_like(here, begin - here.max()))
        stats.add("model_average", t, np.full_like(here, averaged - begin))
        self.F[self.alive] = averaged
        self._unheard = -np.inf
        if epoch_ends:
            back = ~self.alive & (self._dies + self._restart <= begin)
            stats.add("failures", t, averaged - self.F[back])
            self._begin_life(back, np.full_like(self.F, averaged))

    def end(self, t: int) -> None:
        self.F[self.alive] += self._course.durations.gather
        self._course.made(t, np.flatnonzero(self.alive), self.F[self.alive])

    def begin_again(self, t: int) -> None:
        """Begin again at step `t` with the group that returns first."""
        self._in_vain[t] += 1
        if self._in_vain[t] == PATIENCE:
            raise UserError(f"no group lived through the epoch from step {t} on in {PATIENCE:,} attempts")
        self._course.stats.forget(t)
        first = (self._dies + self._restart).argmin()
        all_dead = np.maximum(self._dies, self.F).max()  # a group may die while it waits
        now = max(self._dies[first] + self._restart, all_dead)
        self._course.stats.add("failures", t, now - self.F[first])
        self._unheard = -np.inf
        self._begin_life(np.arange(len(self.F)) == first, np.full_like(self.F, now))

    def close(self) -> None:
        """End the dead groups together with the living ones, and count their time as failures."""
        end = self.F[self.alive].max()
        self._course.stats.add("failures", self._course.T - 1, np.maximum(end - self.F[~self.alive], 0.0))
        self._course.ended[~self.alive] = end

    def _begin_life(self, who: NDArray[np.bool_], now: Seconds) -> None:
        self.F = np.where(who, now, self.F)
        self.alive = self.alive | who
        self._dies[who] = self._deaths.after(now[who], np.flatnonzero(who))
