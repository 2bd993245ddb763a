"""The outgoing link of each host, which serves one message at a time, first come, first served.

If equal messages shared the link fairly, the last one would arrive at the same time as in this queue.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcsgd.performance.simulation.compute import Seconds

Indices = NDArray[np.intp]


class Links:
    """The links of all hosts. Messages of a `begin` call may not be earlier than those of a call before."""

    def __init__(self, hosts: int, busy: float) -> None:
        """Create idle links. `busy`: seconds for which a message occupies a link."""
        self.busy = busy
        self._free = np.zeros(hosts)

    def begin(self, hosts: Indices, times: Seconds) -> Seconds:
        """Return the times at which messages that reach the links of `hosts` at `times` begin to be sent."""
        if not self.busy:
            return times
        order = np.lexsort((times, hosts))
        host, begin = hosts[order], times[order]
        first = np.flatnonzero(np.diff(host, prepend=-1))  # the first message of each host
        length = np.diff(first, append=len(host))
        for place in range(int(length.max(initial=0))):
            here = first[length > place] + place
            begin[here] = np.maximum(begin[here], self._free[host[here]])
            self._free[host[here]] = begin[here] + self.busy
        found = np.empty_like(begin)
        found[order] = begin
        return found
