"""The way out of each host, which serves one message at a time, first come, first served.

A fair share among equal messages would have the last one there at the same time; which one comes when is
simulated exactly for the queue.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcsgd.performance.simulation.compute import Seconds

Indices = NDArray[np.intp]


class Links:
    """One a host. Calls come in the order of time: none with a message from before an earlier call's."""

    def __init__(self, hosts: int, busy: float) -> None:
        """`busy`: seconds that a message takes to leave."""
        self.busy = busy
        self._free = np.zeros(hosts)

    def begin(self, hosts: Indices, times: Seconds) -> Seconds:
        """When messages that come to the links of `hosts` at `times` begin to leave."""
        if not self.busy:
            return times
        order = np.lexsort((times, hosts))
        host, begin = hosts[order], times[order]
        first = np.flatnonzero(np.diff(host, prepend=-1))  # of each host
        length = np.diff(first, append=len(host))
        for place in range(int(length.max(initial=0))):
            here = first[length > place] + place
            begin[here] = np.maximum(begin[here], self._free[host[here]])
            self._free[host[here]] = begin[here] + self.busy
        told = np.empty_like(begin)
        told[order] = begin
        return told
