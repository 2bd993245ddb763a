"""Hierarchical local SGD: groups of K train local models and meet every I steps.

S. Lee, Q. Kang, A. Agrawal, A. Choudhary, W. Liao: Communication-Efficient Local Stochastic Gradient Descent
for Scalable Deep Learning, IEEE Big Data 2020, section III-B ("the hierarchical local SGD paper" elsewhere):

    1  all-to-all in the group: position j receives the K versions of chunk j of the gradient
    2  position j averages them and updates chunk j
    3  every I steps: allreduce of chunk j over the groups, times 1/P
    4  allgather in the group

A step sends 2·(K−1)/K·M, a meeting 2·(P−1)/P·M/K elements a rank: K times less than the baseline below,
which allreduces all of M (eqs. 5 to 8).

Differences from the paper: its update is SGD or Adam, here any optimizer (whole-tensor ones after one more
allgather); it leaves the moments' fate open, here they are kept unless asked otherwise. The gradient's
transfer overlaps the backward pass; buckets are updated, averaged and gathered beside each other; nothing is
left to the next forward pass, but for meetings inside `delayed` or `streamed`.
"""

from __future__ import annotations

from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.step import Exchange
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import AroundMoments, MeanOfAll, Measured, kept, mean_by
from hpcsgd.parts.exchanges import AllReduce, Dense
from hpcsgd.parts.schedules import Every
from hpcsgd.parts.wires.base import Wire


@method(cite="lee2020hierarchical", delayable=True)
@checked
def hierarchical(
    every: int,
    exchange: Exchange = Dense(),  # noqa: B008 - frozen
    moments: AroundMoments = kept,
    average: Wire | None = None,
) -> Method:
    """Local SGD of groups: they train apart and average the chunks that they own after every `every` steps.

    A rank sends 2·(K−1)/K·M elements a step and 2·(P−1)/P·M/K at a meeting. Noted at every meeting:
    `distance`, the D of eq. 9, in the unit of the parameters.

    Not to be confused with `allreduce_local_sgd`, the same training with K times as much to send at a
    meeting, nor with `bsp`, which averages gradients.

    Args:
        every: I, steps from one meeting to the next, at least 1. Large ones save communication; 8 (CIFAR-10)
            and 4 (DIV2K) are the paper's. `hpcsgd.probe` finds the number of groups that goes with it.
        exchange: of gradients inside a group: `AllToAll()` as in the paper, `ReduceScatter()` where memory
            for K gradient chunks is short, `Dense()`, which of both fits where the ranks are, or
            `Sparse(...)`. Default Dense().
        moments: what becomes of momentum at a meeting: `kept`, `Averaged` or `Reset`. Default kept, which
            sends nothing.
        average: how chunks travel at a meeting: `wires.bf16()`, `wires.int8()`, `wires.int4()`, ….
            Default None: as they are.

    Raises:
        UserError: for `every` below 1.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, job, hpcsgd.hierarchical(every=4))
        >>> train(optimizer, steps=4)
        >>> optimizer.notes["distance"] > 0
        True

    Source:
        S. Lee, Q. Kang, A. Agrawal, A. Choudhary, W. Liao: Communication-Efficient Local Stochastic Gradient
        Descent for Scalable Deep Learning, IEEE Big Data 2020, section III-B, eq. 2.
    """
    return Method(exchange=exchange, when=Every(every), how=moments(Measured(mean_by(average))))


@method(cite="lee2020hierarchical")
@checked
def allreduce_local_sgd(every: int, moments: AroundMoments = kept) -> Method:
    """Local SGD as it is usually made, with allreduces of all M: what `hierarchical` is compared with.

    A rank sends 2·(K−1)/K·M elements a step and 2·(P−1)/P·M at a meeting, and keeps all of the optimizer's
    state. Noted at every meeting: `distance`.

    Not to be confused with `hierarchical`, which trains the same model and sends K times less at a meeting.

    Args:
        every: I, steps from one meeting to the next, at least 1.
        moments: what becomes of momentum at a meeting: `kept`, `Averaged` or `Reset`. Default kept.

    Raises:
        UserError: for `every` below 1.

    Example:
        >>> method = hpcsgd.allreduce_local_sgd(every=2)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, job, method)
        >>> train(optimizer, steps=2)
        >>> optimizer.notes["distance"] > 0
        True

    Source:
        The baseline of S. Lee et al., IEEE Big Data 2020, eq. 5.
    """
    return Method(exchange=AllReduce(), when=Every(every), how=moments(Measured(MeanOfAll())))
