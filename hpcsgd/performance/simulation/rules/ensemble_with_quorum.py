"""Groups that do not wait for slow ones: EnsembleSync with a quorum, as `hpcsgd launch` runs it.

The coordinator's own `Membership` and `Arrivals` decide which groups average, for which ones a
synchronization no longer waits, whether late work counts, and which groups have samples. This module only
supplies the times at which groups arrive:

    ready = F + compute + grad_reduce + update    at the synchronization after a group's next steps
    begin = max of ready, over the groups for which the synchronization waits, or the end of the grace time
    F     = begin + average + gather              of the groups that take part

A late group trains on until it is ready, and then asks to return. The synchronization that is due at that
time goes on without it. In the next one all groups wait for each other, and the late group is back. It goes
on at the others' step. If samples were assigned without it meanwhile, it looks on until they are assigned
again: it takes part in synchronizations, but does not train.

An epoch ends with a synchronization, at which samples are assigned. If fewer groups share them, the epoch has
more steps. Messages to the coordinator take no time. In a run, the coordinator finds up to a quarter of a
second later that the grace time is over. With `num_fragments`, a late group's steps count as lost for the
whole model, and each synchronization takes the time of one fragment.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from hpcsgd.core.waits import Period, Quorum, step_of_sync, syncs_after
from hpcsgd.elastic.arrivals import Arrivals
from hpcsgd.elastic.membership import Membership
from hpcsgd.elastic.register import Phase, Point, Register, Vote
from hpcsgd.performance.simulation.compute import Seconds
from hpcsgd.performance.simulation.links import Indices
from hpcsgd.performance.simulation.simulated_run import SimulatedRun, SyncRecord


class Kind(IntEnum):
    """The kinds of events. Those at the same time happen in this order."""

    READY = 0
    """A group is ready to average, or to look on."""
    OVER = 1
    """The grace time is over."""
    AVERAGED = 2
    """The groups that take part have the average."""


@dataclass(frozen=True)
class EnsembleWithQuorum:
    """The rule of EnsembleSync with a `quorum`; groups synchronize after every `every` (T) steps."""

    every: Period
    quorum: Quorum
    dies_as_one = False

    def run(self, course: SimulatedRun) -> None:
        groups = _Groups(course, self.every, self.quorum)
        while not groups.done:
            groups.next_event()
        groups.close()


class _Groups:
    """The coordinator, the state of each group, and the events to come."""

    def __init__(self, course: SimulatedRun, every: Period, quorum: Quorum) -> None:
        P = course.layout.P
        self._course, self._every, self._quorum = course, every, quorum
        self._per_epoch = P * (course.steps_per_epoch or course.T)
        """The steps of an epoch, of all groups together."""
        self._membership = Membership(frozenset(range(P)), late_rounds=quorum.late_rounds)
        self._arrivals = Arrivals(math.inf, quorum.groups, quorum.grace)
        self._since = self._clock = 0.0
        """The time when the synchronization began to wait for groups, and the time now."""
        self._begin = 0.0
        """The time when the current average began."""
        self._events: list[tuple[float, Kind, int]] = []
        """(time, kind, group); 0 in place of the group if the event is about no single one."""
        self._ready = np.zeros(P)
        """The time at which each group is or was ready."""
        self._first, self._t = np.zeros(P, int), np.zeros(P, int)
        """The first step since each group's last synchronization, and the step after its last one."""
        self._ends_epoch = np.zeros(P, bool)
        """True for each group that has no samples left before its next synchronization."""
        self._rounds, self._epochs = np.zeros(P, int), np.zeros(P, int)
        """The committed rounds whose mean each group has, and its epoch."""
        for g in range(P):
            self._ask(g)
        self._commit()  # samples are assigned before the first step
        self._go_on(np.arange(P), np.zeros(P))

    @property
    def done(self) -> bool:
        return self._membership.register.place.t >= self._course.T

    def next_event(self) -> None:
        self._clock, kind, number = heapq.heappop(self._events)
        match kind:
            case Kind.READY:
                self._arrive(number)
            case Kind.OVER:
                self._leave_out()
            case Kind.AVERAGED:
                self._synchronize()

    def close(self) -> None:
        """End the groups that were late at the end: what they learned is lost when they are ready."""
        members = self._membership.register.replica_groups
        late = np.array([g for g in range(len(self._t)) if g not in members], int)
        waited = np.maximum(self._clock - self._ready[late], 0.0)
        self._course.stats.add("for other groups", self._t[late] - 1, waited)
        self._course.made(self._t[late] - 1, late, self._ready[late] + waited + self._course.durations.gather)
        self._lose_steps(late)

    def _arrive(self, g: int) -> None:
        """Let group `g` report that it is ready to average, or ask to return."""
        now = self._membership.register
        if now.phase is Phase.RUN and g in now.replica_groups:
            self._report(g, now)
        else:
            self._ask(g)
            self._follow(now)

    def _report(self, g: int, now: Register) -> None:
        """Let a member report that it is ready; begin to average if it was the last one."""
        had_begun = self._arrivals.have_begun(now)
        self._arrivals.add(g, 0, now, self._clock)
        if self._arrivals.have_begun(now) and not had_begun:
            self._since = self._clock
        if self._arrivals.are_all(now):
            self._begin = self._clock
            seconds = self._course.durations.model_average if len(now.members) > 1 else 0.0
            heapq.heappush(self._events, (self._clock + seconds, Kind.AVERAGED, 0))
        elif (until := self._arrivals.deadline(now, self._since)) < math.inf:
            heapq.heappush(self._events, (until, Kind.OVER, 0))

    def _ask(self, g: int) -> None:
        """Let group `g` ask to join the groups that average."""
        brings = self._quorum.late_rounds > 0 and self._first[g] < self._t[g]
        self._membership.come(g, 0, 1, "", int(self._rounds[g]), brings=bool(brings))

    def _follow(self, before: Register) -> None:
        """Let the groups follow the register, as it was `before` and as it is now."""
        now = self._membership.register
        if now == before:
            return
        self._arrivals.clear()
        self._since = self._clock
        if now.phase is Phase.RUN and now.generation > before.generation:
            for g in now.replica_groups:  # all of them have asked to join this generation, and wait
                self._report(g, now)

    def _leave_out(self) -> None:
        """Leave out the groups that are late, unless all have arrived meanwhile."""
        before = self._membership.register
        if self._clock != self._arrivals.deadline(before, self._since):
            return  # of an earlier synchronization
        late = self._arrivals.late(before, math.nextafter(self._clock, math.inf), self._since)
        for g in late:
            self._membership.lose(g)
        for g in before.replica_groups if late else ():
            if g not in late:
                self._ask(g)
        self._follow(before)

    def _synchronize(self) -> None:
        """Let the members take the average, and go on."""
        course, during = self._course, self._membership.register
        members = np.array(during.replica_groups)
        steps, trained = self._t[members] - 1, self._first[members] < self._t[members]
        F = np.full(len(members), self._clock + course.durations.gather)
        course.stats.add("for other groups", steps, self._begin - self._ready[members])
        course.stats.add("model_average", steps, self._clock - self._begin)
        course.stats.add("gather", steps[~trained], course.durations.gather)
        course.ended[members] = F
        course.made(steps[trained], members[trained], F[trained])
        self._lose_steps(members[trained & ~np.isin(members, during.counting)])
        self._commit()
        place = self._membership.register.place.t
        course.syncs.append(
            SyncRecord(place, self._begin, self._clock, during.replica_groups, during.counting)
        )
        self._go_on(members, F)

    def _commit(self) -> None:
        """Let all members vote for the average that they have."""
        during = self._membership.register
        for g in during.replica_groups:
            place = Point(int(self._t[g]), int(self._epochs[g] + self._ends_epoch[g]))
            self._membership.vote(g, 0, during.generation, during.rounds, Vote(place))
        self._follow(during)

    def _go_on(self, members: Indices, F: Seconds) -> None:
        """Let `members` go on at the times `F`: those that have samples train, the others look on."""
        now = self._membership.register
        self._rounds[members], self._epochs[members] = now.rounds, now.place.epoch
        self._first[members] = self._t[members] = now.place.t
        self._ready[members], self._ends_epoch[members] = F, False
        if not self.done:
            end = now.assigned_at.t + self._per_epoch // len(now.sharing)
            self._train(members[np.isin(members, now.sharing)], now.place.t, end)
            for g in members.tolist():
                heapq.heappush(self._events, (float(self._ready[g]), Kind.READY, g))

    def _train(self, who: Indices, t: int, end: int) -> None:
        """Let groups `who` train from step `t` on until they synchronize. The epoch ends at step `end`."""
        course, d = self._course, self._course.durations
        until = min(step_of_sync(syncs_after(t, self._every) + 1, self._every), end, course.T)
        self._t[who], self._ends_epoch[who] = until, until == end
        for step in range(t, until):
            mean, longest = course.drawn(step)
            course.computed(step, mean[who], longest[who])
            self._ready[who] += longest[who] + d.before_sync
            if step + 1 < until:
                self._ready[who] += d.gather
                course.made(step, who, self._ready[who])

    def _lose_steps(self, groups: Indices) -> None:
        """Record that the steps of `groups` since their last synchronizations are lost."""
        for g in groups.tolist():
            self._course.stats.lost[self._first[g] : self._t[g]] += 1
