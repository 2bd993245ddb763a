"""All that a step of a method sends, put together as `DistributedOptimizer.step` does.

    exchange → [when?] → how → allgather

What happens at a meeting counts with the share of the steps after which groups meet.

Where torch shards the model over the group there is no allgather of ours. torch gathers each block before it
is computed, in the forward pass and in the backward pass, and scatters the sums of its gradients: in a step
of one backward pass, which uses all parameters. That is in no ledger.
"""

from __future__ import annotations

from dataclasses import replace

from hpcsgd.core.optional import sends
from hpcsgd.core.step import publications
from hpcsgd.core.traffic import Message, Sizes, Stage, gathers
from hpcsgd.engine.plan import StepPlan

BY_TORCH = "by torch"
"""The phase of messages that torch sends."""
LAYOUT = 16
"""Bytes by which ranks see that they have the same buffers."""


def of_step(
    plan: StepPlan,
    m: Sizes,
    *,
    meets: float | None = None,
    broadcast: float = 0.0,
) -> list[Message]:
    """The messages of a step, on the mean, in the order in which they leave.

    `meets`: the share of steps after which groups meet, for methods that decide that by what they see.
    `broadcast`: bytes of the buffers that the first rank of a group gives the others after each step.
    Raises `UserError` for these without it, and where a sparsifier cannot tell what it selects.
    """
    assert not plan.stages, "a step is one of a stage"
    exchange = plan.grad_reduce
    found = by_torch(m)
    found += [x.within("gradients") for x in sends(exchange, m)]
    if m.P > 1 or plan.averager.traits.elastic:
        found += [x.within("other") for x in sends(plan.schedule, m)]
        found += [
            replace(x.within("average", plan.sync_rate(meets)), stage="meeting") for x in of_meeting(plan, m)
        ]
    if exchange.traits.shards:
        found += gathered(plan, m)
    if broadcast and m.K > 1:
        found.append(Message("allreduce", "group", LAYOUT, "buffers"))
        found.append(Message("bcast", "group", broadcast, "buffers"))
    return found


def of_meeting(plan: StepPlan, m: Sizes) -> list[Message]:
    """What groups send when they meet; chunks and whole models follow from each other by an allgather."""
    assert not plan.stages, "groups meet as those of a stage"
    exchange, whole = plan.grad_reduce, plan.averager.traits.whole_model
    before = gathers(m) if exchange.traits.shards and whole else []
    after = gathers(m) if not exchange.traits.shards and not whole else []
    return [*before, *sends(plan.averager, m), *after]


def gathered(plan: StepPlan, m: Sizes) -> list[Message]:
    """What makes one model of the positions' chunks: each bucket while others are worked on, but where the
    exchange has a way of its own, which knows all of them."""
    if plan.publishing is not None:
        return list(publications(plan.grad_reduce, m))
    return [replace(x, bucket=i, stage="gather") for i, x in enumerate(gathers(m))]


def by_torch(m: Sizes) -> list[Message]:
    """What torch sends inside a group whose model it shards, of each unit by itself; the outermost one is
    whole from the forward pass on."""
    if m.K == 1:
        return []
    units = list(enumerate(m.units))
    found = [_of_unit("allgather", "forward", i, unit.weights) for i, unit in reversed(units)]
    for i, unit in units:
        found += [] if unit.stays else [_of_unit("allgather", "backward", i, unit.weights)]
        found += [_of_unit("reduce_scatter", "reduce", i, unit.gradients)] if unit.gradients else []
    return found


def _of_unit(operation: str, stage: Stage, i: int, nbytes: int) -> Message:
    return Message(operation, "group", nbytes, BY_TORCH, bucket=i, stage=stage)
