"""All operations of a method's step, in the order in which `DistributedOptimizer.step` issues them.

    gradient reduction → [Muon's all-to-alls] → [sync decision] → [model average] → allgather

The list is for a mean step: the operations of a synchronization count times the share of steps that have one.

With an FSDP model hpcsgd needs no allgather. torch gathers each unit before computing it, in the forward and
in the backward pass, and reduce-scatters its gradients. The prediction assumes one backward pass per step,
which uses all parameters. `CommStats` does not count torch's messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from hpcsgd.core.optional import comm_ops
from hpcsgd.core.step import gather_ops
from hpcsgd.core.traffic import CommOp, ModelLayout, Stage, param_gathers
from hpcsgd.engine.iterates import is_iterate
from hpcsgd.engine.muon_by_rows import PHASE
from hpcsgd.engine.plan import StepPlan
from hpcsgd.parts.averagers.optimizer_state import comparison, sent_by_state

BY_TORCH = "by torch"
"""The phase of the messages that torch sends."""
LAYOUT = 16
"""The bytes of the allreduce by which ranks check that they have the same float buffers."""


def of_step(
    plan: StepPlan,
    m: ModelLayout,
    *,
    sync_rate: float | None = None,
    broadcast: float = 0.0,
) -> list[CommOp]:
    """Return the operations of a mean step of `plan`, in the order in which they are issued.

    `sync_rate`: the share of steps with a synchronization, needed for schedules that depend on the training.
    `broadcast`: bytes of the buffers that the first rank of a group sends to the others after each step.
    Raises `UserError` if `sync_rate` is needed and missing, or if a sparsifier cannot predict its selection.
    """
    assert not plan.sequence, "a step is one of a stage"
    grad_reduce = plan.grad_reduce
    found = by_torch(m)
    found += [x.within("grad_reduce") for x in comm_ops(grad_reduce, m)]
    found += by_muon(m)
    if m.P > 1 or plan.averager.traits.elastic:
        found += [x.within("other") for x in comm_ops(plan.schedule, m)]
        found += [
            replace(x.within("model_average", plan.sync_rate(sync_rate)), stage="model_average")
            for x in ops_of_sync(plan, m)
        ]
    if grad_reduce.traits.leaves_shards:
        found += gathered(plan, m)
    if broadcast and m.K > 1:
        found.append(CommOp("allreduce", "intra_group", LAYOUT, "buffers"))
        found.append(CommOp("bcast", "intra_group", broadcast, "buffers"))
    return found


def ops_of_sync(plan: StepPlan, m: ModelLayout) -> list[CommOp]:
    """Return the operations of a synchronization.

    If the averager needs whole models and ranks have updated shards, an allgather precedes. If it averages
    shards and ranks have updated whole models, an allgather follows. Raw iterates are averaged last.
    """
    assert not plan.sequence, "each stage has its own synchronizations"
    grad_reduce, whole = plan.grad_reduce, plan.averager.traits.whole_model
    before = param_gathers(m) if grad_reduce.traits.leaves_shards and whole else []
    after = param_gathers(m) if not grad_reduce.traits.leaves_shards and not whole else []
    return [
        *before,
        *comm_ops(plan.averager, m),
        *after,
        *(_of_iterate(plan, m) if plan.averages_iterate else ()),
    ]


def _of_iterate(plan: StepPlan, m: ModelLayout) -> Iterator[CommOp]:
    """Yield the operations that average the raw iterate in the state of optimizers such as Schedule-Free."""
    yield comparison()
    shards = plan.sharding != "model" and not plan.averager.traits.whole_model
    for name, layers in m.optimizer_state.items():
        if is_iterate(name):
            yield from sent_by_state(m, layers, shards)


def gathered(plan: StepPlan, m: ModelLayout) -> list[CommOp]:
    """Return the operations that make a whole model of a group's shards, after the update.

    Each bucket is gathered while others are processed. A quantized gather is an exception: it begins when all
    buckets are updated.
    """
    if plan.quantizes_gather is not None:
        return list(gather_ops(plan.grad_reduce, m))
    return [replace(x, bucket=i, stage="gather") for i, x in enumerate(param_gathers(m))]


def by_muon(m: ModelLayout) -> list[CommOp]:
    """Return the all-to-alls by which Muon gets the matrices of an FSDP model whole, and sends them back."""
    together = sum(ranks**2 for ranks in Counter(m.hosts_of_a_group).values())
    away = (m.K**2 - together) / max(m.K * (m.K - 1), 1)
    return [
        CommOp("sendrecv", "intra_group", nbytes, PHASE, times=2 / period, off_host_fraction=away)
        for period, nbytes in m.orthogonalized.items()
        if m.K > 1
    ]


def by_torch(m: ModelLayout) -> list[CommOp]:
    """Return the operations of torch inside a group for an FSDP model, unit by unit.

    A unit that `stays` (the outermost one) remains gathered from the forward pass to the backward pass.
    """
    if m.K == 1:
        return []
    units = list(enumerate(m.units))
    found = [_unit_op("allgather", "forward", i, unit.weights) for i, unit in reversed(units)]
    for i, unit in units:
        found += [] if unit.stays else [_unit_op("allgather", "backward", i, unit.weights)]
        found += [_unit_op("reduce_scatter", "reduce", i, unit.gradients)] if unit.gradients else []
    return found


def _unit_op(operation: str, stage: Stage, i: int, nbytes: int) -> CommOp:
    return CommOp(operation, "intra_group", nbytes, BY_TORCH, bucket=i, stage=stage)
