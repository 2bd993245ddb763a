"""Bulk-synchronous SGD, the baseline of other methods: every update uses the gradients of all ranks.

With 1 group of N ranks it is the usual synchronous data parallelism. With P groups of K ranks, one group per
host, each gradient shard is averaged in the group first and across the groups second. Then each rank sends
M/K elements over the slow links instead of M.
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
    """Return synchronous SGD over all N ranks, in two levels if there are several groups.

    Args:
        grad_reduce: How gradients are averaged in a group; `bsp` extends the average to all groups.
            `AllToAll()` averages in rank order; `ReduceScatter()` needs less memory; `Dense()` chooses
            between the two by where the ranks run; `Sparse(...)` sends a part of the elements. Default
            Dense().

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it may hold state.

    Shape:
        M parameters in total; each rank owns M/K of them. A rank sends 2·(K−1)/K·M elements per step in its
        group, and 2·(P−1)/P·M/K across groups. With one group per host, the slow links carry 1/K of what a
        flat gradient reduction would send over them.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.bsp())
        >>> train(optimizer, steps=2)
        >>> with optimizer.averaged_model() as distance:
        ...     distance
        0.0

    References:
        The baseline in all papers cited here (BSP, AR-SGD). The two levels are those of S. Lee et al., IEEE
        Big Data 2020, section III-B, which average gradients here and models there.

    See Also:
        `hierarchical`: averages models instead of gradients; with momentum `hierarchical(1)` is different
            training.
    """
    return Method(grad_reduce=grad_reduce.across_groups(), schedule=never, averager=Mean())
