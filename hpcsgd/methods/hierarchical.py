"""Hierarchical local SGD: groups of K ranks train local models and average them every I steps.

S. Lee, Q. Kang, A. Agrawal, A. Choudhary, W. Liao: Communication-Efficient Local Stochastic Gradient Descent
for Scalable Deep Learning, IEEE Big Data 2020, section III-B (other files call it "the hierarchical local SGD
paper"):

    1  all-to-all in the group: rank j receives the K versions of shard j of the gradient
    2  rank j averages them and updates shard j
    3  every I steps: allreduce of shard j over the groups, times 1/P
    4  allgather in the group

A rank sends 2·(K−1)/K·M elements in a step and 2·(P−1)/P·M/K more at a synchronization. The latter is K times
less than the paper's baseline sends, which allreduces all M elements (eqs. 5 to 8).

Differences from the paper:

- The paper updates with SGD or Adam. Here any optimizer works; one that needs whole tensors costs one more
  allgather.
- The paper does not say what happens to the optimizer state at a synchronization. By default each group keeps
  its own.
- The transfer of gradients overlaps the backward pass. Updates, averages and gathers of different buckets
  overlap each other. Nothing is left to the next forward pass, except synchronizations inside `delayed` or
  `streaming`.
"""

from __future__ import annotations

from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.step import GradReduce
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import (
    MeanOfAll,
    PseudoGradientPenalty,
    WithDistance,
    WithOptimizerState,
    guarded,
    keep_state,
    mean_by,
)
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
    guard: PseudoGradientPenalty | None = None,
) -> Method:
    """Return hierarchical local SGD: ranks average the shards that they own over the groups.

    The K ranks of a group train one model with data parallelism. Every `sync_every` steps the P groups
    average their models; each rank averages only the shard that it owns. This is local SGD whose workers are
    groups.

    Args:
        sync_every: Steps between two synchronizations (the paper's I), at least 1. Large values save
            communication. The paper uses 8 for CIFAR-10 and 4 for DIV2K. `hpcsgd.probe` finds a suitable
            number of groups.
        grad_reduce: How the gradients of a group are averaged in every step. `AllToAll()` is the paper's;
            `ReduceScatter()` needs less memory; `Dense()` chooses between the two by where the ranks run;
            `Sparse(...)` sends a part of the elements. Default Dense().
        optimizer_state: What happens to momentum and other optimizer state at a synchronization:
            `keep_state`, `AverageState` or `ResetState`. Default keep_state, which sends nothing.
        quantize: Format in which shards travel at a synchronization, such as `quantizers.bf16()`,
            `quantizers.int8()` or `quantizers.int4()`. Default None: their own dtype.
        guard: What protects the mean from groups whose changes are outliers: `PseudoGradientPenalty()`.
            Default None: the plain mean.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it may hold state.

    Raises:
        UserError: If `sync_every` is below 1.

    Shape:
        M parameters in total; each rank owns M/K of them. A rank sends 2·(K−1)/K·M elements per step, and
        2·(P−1)/P·M/K more per synchronization.

    Note:
        After a synchronization, `optimizer.metrics["distance"]` is the D of eq. 9, in the unit of the
        parameters.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=4)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> optimizer.metrics["distance"] > 0
        True

    References:
        S. Lee, Q. Kang, A. Agrawal, A. Choudhary, W. Liao: Communication-Efficient Local Stochastic Gradient
        Descent for Scalable Deep Learning, IEEE Big Data 2020, section III-B, eq. 2.

    See Also:
        `allreduce_local_sgd`: the same training, which sends K times as much per synchronization.
        `bsp`: averages gradients instead of models.
    """
    return Method(
        grad_reduce=grad_reduce,
        schedule=Every(sync_every),
        averager=optimizer_state(WithDistance(guarded(mean_by(quantize), guard))),
    )


@method(cite="lee2020hierarchical")
@checked
def allreduce_local_sgd(sync_every: int, optimizer_state: WithOptimizerState = keep_state) -> Method:
    """Return local SGD with allreduces of the whole model: the baseline of `hierarchical`.

    It trains the same model as `hierarchical`. Every rank updates the whole model and holds all of the
    optimizer's state.

    Args:
        sync_every: Steps between two synchronizations (the paper's I), at least 1.
        optimizer_state: What happens to momentum and other optimizer state at a synchronization:
            `keep_state`, `AverageState` or `ResetState`. Default keep_state.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it may hold state.

    Raises:
        UserError: If `sync_every` is below 1.

    Shape:
        M parameters in total. A rank sends 2·(K−1)/K·M elements per step, and 2·(P−1)/P·M more per
        synchronization.

    Note:
        After a synchronization, `optimizer.metrics["distance"]` is the D of eq. 9, in the unit of the
        parameters.

    Example:
        >>> method = hpcsgd.allreduce_local_sgd(sync_every=2)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["distance"] > 0
        True

    References:
        The baseline of S. Lee et al., IEEE Big Data 2020, eq. 5.

    See Also:
        `hierarchical`: the same training, which sends K times less per synchronization.
    """
    return Method(
        grad_reduce=AllReduce(),
        schedule=Every(sync_every),
        averager=optimizer_state(WithDistance(MeanOfAll())),
    )
