"""Bulk-synchronous SGD: every rank's gradient in every update. The yardstick for everything else.

As 1 × N it is the usual synchronous data parallelism. As P × K, with a group on each host, the gradient
chunk of each position is averaged inside the group first and across groups second, so that M/K elements a
rank cross the slow links instead of M.
"""

from __future__ import annotations

from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.step import GroupGradReduce
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import Mean
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.schedules import never


@method()
@checked
def bsp(grad_reduce: GroupGradReduce = Dense()) -> Method:  # noqa: B008 - frozen
    """Synchronous SGD over all N ranks, in two levels where there are groups.

    A rank sends 2·(K−1)/K·M elements a step, and 2·(P−1)/P·M/K more across groups: with a group on each host
    the slow links carry a K-th of what a flat exchange would send over them.

    Not to be confused with `hierarchical(sync_every=1)`, which averages models after every update: the same
    for plain SGD, and not where there is momentum.

    Args:
        grad_reduce: of gradients, made one among all groups: `AllToAll()` as the mean in rank order,
            `ReduceScatter()` where memory for K gradient chunks is short, `Dense()`, which of both fits where
            the ranks are, or `Sparse(...)`. Default Dense().

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.bsp())
        >>> train(optimizer, steps=2)
        >>> with optimizer.averaged_model() as distance:
        ...     distance
        0.0

    Source:
        The yardstick of all papers here (BSP, AR-SGD); in two levels as the frame of S. Lee et al., IEEE Big
        Data 2020, section III-B, with the mean of gradients in place of models.
    """
    return Method(grad_reduce=grad_reduce.across_groups(), schedule=never, averager=Mean())
