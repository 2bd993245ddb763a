"""Groups that send messages, many at a time.

Events have to be served in the order of time, since messages queue. One by one that is slow; but whoever ends
a step now will not send again before it has made another one. So there is a horizon before which no message
can turn up that is not known yet: the earliest one known, and the shortest step of all after it. What is
ready before it is served at once, as a vector.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hpcsgd.performance.simulation.compute import Seconds
from hpcsgd.performance.simulation.links import Indices
from hpcsgd.performance.simulation.simulated_run import SimulatedRun, Table


class Inbox(Protocol):
    """What has come, and who may go on by it."""

    @property
    def staleness(self) -> int:
        """τ: a step needs the messages that were sent so many steps before, the group's own among them."""
        ...

    @property
    def always(self) -> bool:
        """Whether every group sends at the end of every step."""
        ...

    def sending(self, groups: Indices, steps: Indices) -> Indices:
        """The places of those groups that send at the end of these steps."""
        ...

    def deliver(self, groups: Indices, steps: Indices, times: Seconds) -> None:
        """What these groups sent at the end of these steps is there at these times."""
        ...

    def there(self, groups: Indices, steps: Indices) -> Seconds:
        """When all that each group needs from others to end its step was there; infinite if not known yet,
        −infinite if it needs nothing."""
        ...


def in_windows(course: SimulatedRun, inbox: Inbox) -> None:
    """Every step: compute, exchange, update; send, if it is time; wait until all that is needed is there;
    gather."""
    P, d, tau = course.layout.P, course.durations, inbox.staleness
    everyone = np.arange(P)
    work, links, sent = Table(course), course.links(), _Sent(tau, P)
    step = np.full(P, course.first, np.intp)
    ready = course.start + work(everyone, step)
    """Of those who have not sent yet; infinite for those who wait, and for those who have ended."""
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
    assert (step == course.T).all(), "groups wait for what nobody sends"


class _Sent:
    """The last τ + 1 messages of each group: when they were there, and how long they had queued."""

    def __init__(self, staleness: int, P: int) -> None:
        self._kept = staleness + 1
        self._arrived = np.full((self._kept, P), -np.inf)
        self._queued = np.zeros((self._kept, P))

    def keep(self, groups: Indices, steps: Indices, arrived: Seconds, queued: Seconds) -> None:
        self._arrived[steps % self._kept, groups] = arrived
        self._queued[steps % self._kept, groups] = queued

    def needed(self, groups: Indices, steps: Indices) -> tuple[Seconds, Seconds]:
        """Of the messages of τ steps before."""
        place = (steps + 1) % self._kept
        return self._arrived[place, groups], self._queued[place, groups]
