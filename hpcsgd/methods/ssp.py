"""Stale synchronous parallel: groups need not wait for each other, but none runs far ahead.

Q. Ho, J. Cipar, H. Cui, S. Lee, J. K. Kim, P. B. Gibbons, G. A. Gibson, G. Ganger, E. Xing: More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013, section 2: a worker that reads at
clock c sees every update of clocks up to c − s − 1, maybe later ones, and its own; it waits while the slowest
is more than s clocks behind. With s = 0 that is synchronous SGD.

The paper's worker is a group here, its clock ticks once a step; the table is sharded over all N ranks. What
is pushed is the change that the group's own optimizer made (its momentum is local), times 1/P. The paper
caches reads until they are too old; here every step reads.
"""

from __future__ import annotations

from hpcsgd.averagers.server import Server
from hpcsgd.core.step import Exchange, Method
from hpcsgd.exchanges import AllToAll
from hpcsgd.schedules import Every


def ssp(staleness: int, exchange: Exchange = AllToAll()) -> Method:  # noqa: B008 - frozen
    """No group is more than `staleness` (s) steps ahead of the slowest. A rank sends and receives
    (P−1)/P·M/K a step for its own group, and as much for what it keeps."""
    return Method(exchange=exchange, when=Every(1), how=Server(staleness))
