"""Asynchronous decentralized parallel SGD: in every step an even group averages with a random odd one.

X. Lian, W. Zhang, C. Zhang, J. Liu: Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML
2018. As in `hpcsgd.ad_psgd`, an average that begins at the end of a step is used at the end of the next step.
F is the time at which a group's last step ended:

    ready = F + compute + grad_reduce + update
    asked = max(ready, answered)      the request is sent, after earlier ones on the link of its host
    answered ← when the partner's answer has arrived, after earlier ones on the link of the partner's host
    F ← asked + gather

Odd groups answer while they compute, and never wait. Requests queue at a host's link, and answers queue
separately, because requests and answers use different directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcsgd.performance.simulation.compute import Seconds
from hpcsgd.performance.simulation.links import Indices
from hpcsgd.performance.simulation.simulated_run import SimulatedRun, Table


@dataclass(frozen=True)
class AdPsgd:
    """The rule of AD-PSGD. Requests and answers are messages of equal size; `seed` determines partners."""

    seed: int = 0
    dies_as_one = True

    def run(self, course: SimulatedRun) -> None:
        P = course.layout.P
        work = Table(course)
        odd = _Passive(course, work, np.arange(1 if P > 1 else 0, P, 2))
        if P > 1:
            _Active(course, work, self).run(odd)
        odd.go_on(course.T)

    def partners(self, t: int, P: int) -> Indices:
        """Return the odd partner of each even group 0, 2, … of P groups at the end of step `t`."""
        drawn = np.random.Generator(np.random.SFC64([self.seed, t]))
        return 2 * drawn.integers(P // 2, size=(P + 1) // 2) + 1


class _Passive:
    """The odd groups, which never wait. If there is only one group, it is treated like an odd one."""

    def __init__(self, course: SimulatedRun, work: Table, groups: Indices) -> None:
        self._course, self._work, self._groups = course, work, groups
        self._F = np.full(len(groups), course.start)
        self._made = course.first

    def go_on(self, steps: int) -> None:
        """Simulate the groups until they have made `steps` steps."""
        for t in range(self._made, steps):
            seconds = self._work(self._groups, np.full(len(self._groups), t))
            self._F = self._F + seconds + self._course.durations.gather
            self._course.made(t, self._groups, self._F)
            self._made = t + 1


class _Active:
    """The even groups, simulated in windows as by `in_windows`.

    A group's next request also waits for the answer to its last request. So the horizon is at most the
    earliest time at which this answer can arrive.
    """

    def __init__(self, course: SimulatedRun, work: Table, rule: AdPsgd) -> None:
        self._course, self._work, self._rule = course, work, rule
        self.groups = np.arange(0, course.layout.P, 2)
        n = len(self.groups)
        self.step = np.full(n, course.first, np.intp)
        self.ready = course.start + work(self.groups, self.step)
        self.next_work = work(self.groups, self.step + 1)
        self.there = np.full(n, -np.inf)
        """When each group's last request reached its partner."""
        self.answered = np.full(n, -np.inf)
        """When the answer to each group's last request arrived; infinite while that is unknown."""
        self.queued = np.zeros(n)
        self._questions, self._answers = course.links(), course.links()
        self._partner = np.zeros(n, np.intp)
        self._drawn: dict[int, Indices] = {}
        self._drawn_by = np.zeros(course.T, int)

    def run(self, others: _Passive) -> None:
        """Simulate all steps, and advance `others` at the same time, so that few seconds are stored."""
        message, gather = self._course.durations.message, self._course.durations.gather
        while np.isfinite(self.ready).any():
            asks = np.maximum(self.ready, self.answered)  # infinite, too, for groups that have ended
            earliest = np.maximum(self.ready, self.there + message.link + message.latency)
            unknown = np.where(self.answered == np.inf, earliest, np.inf)
            horizon = min((asks + gather + self.next_work).min(), unknown.min())
            self._ask(np.flatnonzero(asks < horizon), asks)
            self._answer(horizon + message.link + message.latency)
            others.go_on(int(self.step.min()))

    def _ask(self, now: Indices, asks: Seconds) -> None:
        """End the steps of the groups `now`, and send their requests."""
        course, message = self._course, self._course.durations.message
        steps, groups, times = self.step[now], self.groups[now], asks[now]
        waited = times - self.ready[now]
        for_link = np.minimum(waited, self.queued[now])
        course.stats.add("for the link", steps, for_link)
        course.stats.add("messages", steps, waited - for_link)
        course.made(steps, groups, times + course.durations.gather)

        begin = self._questions.begin(course.host(groups), times)
        self.there[now] = begin + message.link + message.latency
        self.queued[now] = begin - times
        self.answered[now] = np.inf
        self._partner[now] = self._partners(now, steps)
        self.ready[now] = times + course.durations.gather + self.next_work[now]
        self.step[now] += 1
        self.next_work[now] = self._work(groups, self.step[now] + 1)

    def _answer(self, until: float) -> None:
        """Send the answers to all requests that arrive before `until`. All such requests are known now."""
        message = self._course.durations.message
        now = np.flatnonzero((self.answered == np.inf) & (self.there < until))
        begin = self._answers.begin(self._course.host(self._partner[now]), self.there[now])
        self.answered[now] = begin + message.link + message.latency
        self.queued[now] += begin - self.there[now]

    def _partners(self, now: Indices, steps: Indices) -> Indices:
        partners = np.empty(len(now), np.intp)
        for t in np.unique(steps).tolist():
            if t not in self._drawn:
                self._drawn[t] = self._rule.partners(t, self._course.layout.P)
            here = steps == t
            partners[here] = self._drawn[t][now[here]]
            self._drawn_by[t] += np.count_nonzero(here)
            if self._drawn_by[t] == len(self.groups):
                del self._drawn[t]
        return partners
