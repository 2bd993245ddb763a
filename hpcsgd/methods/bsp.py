"""Bulk-synchronous SGD: every rank's gradient in every update. The yardstick for everything else.

As 1 × N it is the usual synchronous data parallelism. As P × K, with a group on each host, the gradient
chunk of each position is averaged inside the group first and across groups second, so that M/K elements a
rank cross the slow links instead of M.
"""

from __future__ import annotations

from hpcsgd.averagers import Mean
from hpcsgd.core.step import GroupExchange, Method
from hpcsgd.exchanges import AllToAll
from hpcsgd.schedules import never


def bsp(exchange: GroupExchange = AllToAll()) -> Method:  # noqa: B008 - frozen
    """Synchronous SGD over all N ranks, in two levels where there are groups."""
    return Method(exchange=exchange.across_groups(), when=never, how=Mean())
