"""All that a step of a method sends, put together as `DistributedOptimizer.step` does.

    exchange → [when?] → how → allgather

What happens at a meeting counts with the share of the steps after which groups meet.

Where torch shards the model over the group there is no allgather of ours. torch gathers each block before it
is computed, in the forward pass and in the backward pass, and scatters the sums of its gradients: in a step
of one backward pass, which uses all parameters. That is in no ledger.
"""

from __future__ import annotations

from dataclasses import replace

from hpcsgd.core.optional import comm_ops
from hpcsgd.core.step import gather_ops
from hpcsgd.core.traffic import CommOp, ModelLayout, Stage, param_gathers
from hpcsgd.engine.plan import StepPlan

BY_TORCH = "by torch"
"""The phase of messages that torch sends."""
LAYOUT = 16
"""Bytes by which ranks see that they have the same buffers."""


def of_step(
    plan: StepPlan,
    m: ModelLayout,
    *,
    meets: float | None = None,
    broadcast: float = 0.0,
) -> list[CommOp]:
    """The messages of a step, on the mean, in the order in which they leave.

    `meets`: the share of steps after which groups meet, for methods that decide that by what they see.
    `broadcast`: bytes of the buffers that the first rank of a group gives the others after each step.
    Raises `UserError` for these without it, and where a sparsifier cannot tell what it selects.
    """
    assert not plan.sequence, "a step is one of a stage"
    exchange = plan.grad_reduce
    found = by_torch(m)
    found += [x.within("gradients") for x in comm_ops(exchange, m)]
    if m.P > 1 or plan.averager.traits.elastic:
        found += [x.within("other") for x in comm_ops(plan.schedule, m)]
        found += [
            replace(x.within("average", plan.sync_rate(meets)), stage="model_average")
            for x in ops_of_sync(plan, m)
        ]
    if exchange.traits.shards:
        found += gathered(plan, m)
    if broadcast and m.K > 1:
        found.append(CommOp("allreduce", "group", LAYOUT, "buffers"))
        found.append(CommOp("bcast", "group", broadcast, "buffers"))
    return found


def ops_of_sync(plan: StepPlan, m: ModelLayout) -> list[CommOp]:
    """What groups send when they meet; chunks and whole models follow from each other by an allgather."""
    assert not plan.sequence, "groups meet as those of a stage"
    exchange, whole = plan.grad_reduce, plan.averager.traits.whole_model
    before = param_gathers(m) if exchange.traits.shards and whole else []
    after = param_gathers(m) if not exchange.traits.shards and not whole else []
    return [*before, *comm_ops(plan.averager, m), *after]


def gathered(plan: StepPlan, m: ModelLayout) -> list[CommOp]:
    """What makes one model of the positions' chunks: each bucket while others are worked on, but where the
    exchange has a way of its own, which knows all of them."""
    if plan.quantizes_gather is not None:
        return list(gather_ops(plan.grad_reduce, m))
    return [replace(x, bucket=i, stage="gather") for i, x in enumerate(param_gathers(m))]


def by_torch(m: ModelLayout) -> list[CommOp]:
    """What torch sends inside a group whose model it shards, of each unit by itself; the outermost one is
    whole from the forward pass on."""
    if m.K == 1:
        return []
    units = list(enumerate(m.units))
    found = [_unit_op("allgather", "forward", i, unit.weights) for i, unit in reversed(units)]
    for i, unit in units:
        found += [] if unit.stays else [_unit_op("allgather", "backward", i, unit.weights)]
        found += [_unit_op("reduce_scatter", "reduce", i, unit.gradients)] if unit.gradients else []
    return found


def _unit_op(operation: str, stage: Stage, i: int, nbytes: int) -> CommOp:
    return CommOp(operation, "group", nbytes, BY_TORCH, bucket=i, stage=stage)
