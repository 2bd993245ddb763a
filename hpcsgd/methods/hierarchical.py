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
left to the next forward pass, but for meetings inside `delayed` or `streaming`.
"""

from __future__ import annotations

from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.step import GradReduce
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import MeanOfAll, WithDistance, WithOptimizerState, keep_state, mean_by
from hpcsgd.parts.grad_reduces import AllReduce, Dense
from hpcsgd.parts.quantizers.base import Quantizer
from hpcsgd.parts.schedules import Every


@method(cite="lee2020hierarchical", delayable=True)
@checked
def hierarchical(
    sync_every: int,
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
    optimizer_state: WithOptimizerState = keep_state,
    quantize: Quantizer | None = None,
) -> Method:
    """Local SGD of groups: they train apart and average the chunks that they own, every `sync_every` steps.

    A rank sends 2·(K−1)/K·M elements a step and 2·(P−1)/P·M/K at a meeting. Noted at every meeting:
    `distance`, the D of eq. 9, in the unit of the parameters.

    Not to be confused with `allreduce_local_sgd`, the same training with K times as much to send at a
    meeting, nor with `bsp`, which averages gradients.

    Args:
        sync_every: I, steps from one meeting to the next, at least 1. Large ones save communication; 8
            (CIFAR-10) and 4 (DIV2K) are the paper's. `hpcsgd.probe` finds the number of groups that goes with
            it.
        grad_reduce: of gradients inside a group: `AllToAll()` as in the paper, `ReduceScatter()` where memory
            for K gradient chunks is short, `Dense()`, which of both fits where the ranks are, or
            `Sparse(...)`. Default Dense().
        optimizer_state: what becomes of momentum at a meeting: `keep_state`, `AverageState` or `ResetState`.
            Default keep_state, which sends nothing.
        quantize: how chunks travel at a meeting: `quantizers.bf16()`, `quantizers.int8()`,
            `quantizers.int4()`, …. Default None: as they are.

    Raises:
        UserError: for `sync_every` below 1.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=4)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> optimizer.metrics["distance"] > 0
        True

    Source:
        S. Lee, Q. Kang, A. Agrawal, A. Choudhary, W. Liao: Communication-Efficient Local Stochastic Gradient
        Descent for Scalable Deep Learning, IEEE Big Data 2020, section III-B, eq. 2.
    """
    return Method(
        grad_reduce=grad_reduce,
        schedule=Every(sync_every),
        averager=optimizer_state(WithDistance(mean_by(quantize))),
    )


@method(cite="lee2020hierarchical")
@checked
def allreduce_local_sgd(sync_every: int, optimizer_state: WithOptimizerState = keep_state) -> Method:
    """Local SGD as it is usually made, with allreduces of all M: what `hierarchical` is compared with.

    A rank sends 2·(K−1)/K·M elements a step and 2·(P−1)/P·M at a meeting, and keeps all of the optimizer's
    state. Noted at every meeting: `distance`.

    Not to be confused with `hierarchical`, which trains the same model and sends K times less at a meeting.

    Args:
        sync_every: I, steps from one meeting to the next, at least 1.
        optimizer_state: what becomes of momentum at a meeting: `keep_state`,
            `AverageState` or `ResetState`. Default keep_state.

    Raises:
        UserError: for `sync_every` below 1.

    Example:
        >>> method = hpcsgd.allreduce_local_sgd(sync_every=2)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["distance"] > 0
        True

    Source:
        The baseline of S. Lee et al., IEEE Big Data 2020, eq. 5.
    """
    return Method(
        grad_reduce=AllReduce(),
        schedule=Every(sync_every),
        averager=optimizer_state(WithDistance(MeanOfAll())),
    )
