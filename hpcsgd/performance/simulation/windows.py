"""Simulate groups that send messages, many events at a time.

Messages wait in queues, so events must be processed in the order of time. One by one, that is slow. But a
group that ends a step now cannot send again before it has made another step. So no unknown message can appear
before a horizon: the earliest known message plus the shortest following step. All events before the horizon
are processed at once, as a vector.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hpcsgd.performance.simulation.compute import Seconds
from hpcsgd.performance.simulation.links import Indices
from hpcsgd.performance.simulation.simulated_run import SimulatedRun, Table


class Inbox(Protocol):
    """A record of the messages that have arrived, which decides which groups may continue."""

    @property
    def staleness(self) -> int:
        """τ: to end a step, a group needs the messages that it and others sent τ steps before."""
        ...

    @property
    def always(self) -> bool:
        """True if every group sends at the end of every step."""
        ...

    def sending(self, groups: Indices, steps: Indices) -> Indices:
        """Return the indices into `groups` of the groups that send at the end of their step in `steps`."""
        ...

    def deliver(self, groups: Indices, steps: Indices, times: Seconds) -> None:
        """Record that the messages that `groups` sent at the end of `steps` arrive at `times`."""
        ...

    def there(self, groups: Indices, steps: Indices) -> Seconds:
        """Return the time at which each group got the last message that it needs to end its step.

        The time is infinite if it is not known yet, and −infinite if the group needs nothing.
        """
        ...


def in_windows(course: SimulatedRun, inbox: Inbox) -> None:
    """Simulate all steps of `course`: compute, reduce gradients, update, send, wait for messages, gather.

    `inbox` decides which groups send after a step, and which messages a group waits for.
    """
    P, d, tau = course.layout.P, course.durations, inbox.staleness
    everyone = np.arange(P)
    work, links, sent = Table(course), course.links(), _Sent(tau, P)
    step = np.full(P, course.first, np.intp)
    ready = course.start + work(everyone, step)
    """When each group is ready to send; infinite for groups that wait for messages or have ended."""
    came = np.zeros(P)
    waiting = np.zeros(P, bool)
    next_work = work(everyone, step + 1)
    soonest = d.gather + (d.message.link + d.message.latency if inbox.always and not tau else 0.0)
    while (earliest := ready.min()) < np.inf:
        horizon = earliest + soonest + next_work.min()
        now = np.flatnonzero(ready < horizon)
        came[now] = ready[now]
        sent.keep(now, step[now], np.full(len(now), -np.inf), np.zeros(len(now)))
        sending = now[inbox.sending(now, step[now])]
        begin = links.begin(course.host(sending), came[sending])
        arrived = begin + d.message.link + d.message.latency
        sent.keep(sending, step[sending], arrived, begin - came[sending])
        inbox.deliver(sending, step[sending], arrived)
        ready[now], waiting[now] = np.inf, True

        free = np.flatnonzero(waiting)
        there = inbox.there(free, step[free])
        free, there = free[there < np.inf], there[there < np.inf]
        steps = step[free]
        own, queued = sent.needed(free, steps)
        own = np.maximum(came[free], own)
        released = np.maximum(own, there)
        for_link = np.minimum(own - came[free], queued)
        course.stats.add("for the link", steps, for_link)
        course.stats.add("messages", steps, own - came[free] - for_link)
        course.stats.add("for other groups", steps, released - own)
        course.made(steps, free, released + d.gather)

        step[free] += 1
        waiting[free] = False
        ready[free] = released + d.gather + next_work[free]
        next_work[free] = work(free, step[free] + 1)
    assert (step == course.T).all(), "groups wait for messages that no group sends"


class _Sent:
    """The last τ + 1 messages of each group: when they arrived, and how long they had queued."""

    def __init__(self, staleness: int, P: int) -> None:
        self._kept = staleness + 1
        self._arrived = np.full((self._kept, P), -np.inf)
        self._queued = np.zeros((self._kept, P))

    def keep(self, groups: Indices, steps: Indices, arrived: Seconds, queued: Seconds) -> None:
        self._arrived[steps % self._kept, groups] = arrived
        self._queued[steps % self._kept, groups] = queued

    def needed(self, groups: Indices, steps: Indices) -> tuple[Seconds, Seconds]:
        """Return when each group's message of τ steps before arrived, and the seconds that it had queued."""
        place = (steps + 1) % self._kept
        return self._arrived[place, groups], self._queued[place, groups]
