"""Each rule implemented again as simpy processes: one per group, one event at a time.

Of `hpcsgd.performance.simulation`, this uses only the parts that describe a job: the drawn seconds, the
partners and the graph. A link serves messages in order of arrival, and those that arrive at the same time in
the order of their groups. This is frequent, because the delays of queued messages differ by whole messages.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator
from fractions import Fraction
from typing import Any

import numpy as np
import simpy

from hpcsgd.performance.simulation.compute import Compute
from hpcsgd.performance.simulation.durations import Durations, Message
from hpcsgd.performance.simulation.rules import AdPsgd, AsyncSgd, Delayed, Paired, Push, Ssp, Synchronous

Process = Generator[simpy.Event, Any, None]


LAST = 2  # priority of events that come after all others at the same time


class Link:
    def __init__(self, env: simpy.Environment, busy: float) -> None:
        self.env, self.busy = env, busy
        self.queue: list[tuple[float, int, simpy.Event]] = []
        self.idle = True

    def passed(self, g: int) -> simpy.Event:
        """Return the event at which the message of group g that arrives now has left."""
        done = self.env.event()
        heapq.heappush(self.queue, (self.env.now, g, done))
        if self.idle:
            self.idle = False
            self.env.process(self.serve())
        return done

    def serve(self) -> Process:
        while self.queue:
            moment = self.env.event()
            moment._ok, moment._value = True, None
            self.env.schedule(moment, LAST)  # pyright: ignore[reportArgumentType] - it sorts numbers
            yield moment
            _, _, done = heapq.heappop(self.queue)
            yield self.env.timeout(self.busy)
            done.succeed()
        self.idle = True


class Job:
    """A job that records when each group ended each step, in `F` (T, P)."""

    def __init__(self, compute: Compute, durations: Durations, T: int) -> None:
        self.env = simpy.Environment()
        self.layout, self.d, self.T = compute.layout, durations, T
        self.P = compute.layout.P
        self.seconds = [compute.seconds(t) for t in range(T)]
        self.F = np.full((T, self.P), np.nan)
        self.message = durations.message if self.P > 1 else Message()
        self.questions = [Link(self.env, self.message.link) for _ in range(self.P)]
        self.answers = [Link(self.env, self.message.link) for _ in range(self.P)]
        self._events: dict[Any, simpy.Event] = {}

    def event(self, *name: Any) -> simpy.Event:
        return self._events.setdefault(name, self.env.event())

    def compute(self, g: int, t: int) -> Process:
        """Wait for all K ranks to compute, reduce gradients and update."""
        rest = self.d.grad_reduce + self.d.update
        yield self.env.all_of([self.env.timeout(seconds + rest) for seconds in self.seconds[t][g]])

    def gather(self, g: int, t: int) -> Process:
        yield self.env.timeout(self.d.gather)
        self.F[t, g] = self.env.now

    def send(self, links: list[Link], at: int, g: int, there: simpy.Event) -> Process:
        """Send a message of group g over the link of the host of group `at`."""
        if self.message.link:
            yield links[at // self.layout.groups_on_a_host].passed(g)
        yield self.env.timeout(self.message.latency)
        there.succeed()

    def run(self, group: Callable[[int], Process]) -> np.ndarray:
        for g in range(self.P):
            self.env.process(group(g))
        self.env.run()
        return self.F


def synchronizes(t: int, period: Fraction | int) -> bool:
    """Return True if groups synchronize after step t, from 0; the n-th time is after ⌈n·period⌉ steps."""
    return t + 1 in {math.ceil(n * period) for n in range(1, t + 2)}


def synchronous(job: Job, rule: Synchronous) -> np.ndarray:
    arrived = [0] * job.T

    def group(g: int) -> Process:
        for t in range(job.T):
            yield from job.compute(g, t)
            if synchronizes(t, rule.period) and job.P > 1:
                arrived[t] += 1
                if arrived[t] == job.P:
                    job.event(t).succeed()
                yield job.event(t)
                yield job.env.timeout(job.d.model_average)
            yield from job.gather(g, t)

    return job.run(group)


def delayed(job: Job, rule: Delayed) -> np.ndarray:
    arrived = [0] * job.T
    comm_thread = simpy.Resource(job.env)

    def synchronization(t: int) -> Process:
        with comm_thread.request() as turn:
            yield turn
            yield job.env.timeout(job.d.model_average)
        job.event(t).succeed()

    def group(g: int) -> Process:
        for t in range(job.T):
            yield from job.compute(g, t)
            begun = t - rule.steps
            if begun >= 0 and synchronizes(begun, rule.period) and job.P > 1:
                yield job.event(begun)
            if synchronizes(t, rule.period) and job.P > 1:
                arrived[t] += 1
                if arrived[t] == job.P:
                    job.env.process(synchronization(t))
            yield from job.gather(g, t)

    return job.run(group)


def push(job: Job, rule: Push) -> np.ndarray:
    senders = [
        [
            [i for i in range(job.P) if g in rule.graph.peers(i, t, job.P)] for g in range(job.P)
        ]
        for t in range(job.T)
    ]  # fmt: skip

    def group(g: int) -> Process:
        for t in range(job.T):
            yield from job.compute(g, t)
            if synchronizes(t, rule.period):
                job.env.process(job.send(job.questions, g, g, job.event(g, t)))
            sent = t - rule.staleness
            if sent >= 0 and synchronizes(sent, rule.period):
                yield job.env.all_of([job.event(i, sent) for i in [g, *senders[sent][g]]])
            yield from job.gather(g, t)

    return job.run(group)


def paired(job: Job, rule: Paired) -> np.ndarray:
    def group(g: int) -> Process:
        for t in range(job.T):
            yield from job.compute(g, t)
            if synchronizes(t, rule.period) and g in rule.pairs.partners(t + 1, job.P):
                job.env.process(job.send(job.questions, g, g, job.event(g, t)))
            sent = t - rule.pairs.late
            partners = rule.pairs.partners(sent + 1, job.P)
            if sent >= 0 and synchronizes(sent, rule.period) and g in partners:
                yield job.env.all_of([job.event(i, sent) for i in (g, partners[g])])
            yield from job.gather(g, t)

    return job.run(group)


def ssp(job: Job, rule: Ssp) -> np.ndarray:
    pushed = [0] * (job.T + 1)

    def ask(g: int, t: int) -> Process:
        """Send the n-th change, and wait for the (n − s)-th of all groups, if there is one."""
        yield from job.send(job.questions, g, g, job.event(g, t))
        n = (t + 1) // rule.period
        pushed[n] += 1
        if pushed[n] == job.P:
            job.event("all", n).succeed()
        if n > rule.staleness:
            yield job.event("all", n - rule.staleness)

    def group(g: int) -> Process:
        for t in range(job.T):
            yield from job.compute(g, t)
            if synchronizes(t, rule.period):
                yield from ask(g, t)
            yield from job.gather(g, t)

    return job.run(group)


def async_sgd(job: Job, rule: AsyncSgd) -> np.ndarray:
    def group(g: int) -> Process:
        for t in range(job.T):
            yield from job.compute(g, t)
            if synchronizes(t, rule.period):
                yield from job.send(job.questions, g, g, job.event(g, t))
            yield from job.gather(g, t)

    return job.run(group)


def ad_psgd(job: Job, rule: AdPsgd) -> np.ndarray:
    def ask(g: int, t: int) -> Process:
        yield from job.send(job.questions, g, g, job.event("there", g, t))
        partner = int(rule.partners(t, job.P)[g // 2])
        assert partner % 2 == 1
        yield from job.send(job.answers, partner, g, job.event("answered", g, t))

    def group(g: int) -> Process:
        for t in range(job.T):
            yield from job.compute(g, t)
            if g % 2 == 0 and job.P > 1:
                if t:
                    yield job.event("answered", g, t - 1)
                job.env.process(ask(g, t))
            yield from job.gather(g, t)

    return job.run(group)
