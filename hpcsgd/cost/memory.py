"""Bytes that a rank keeps from one step to the next: 2·M, moments of M or M/K, and what the method holds.

Where torch shards the model over the group it is 2·M/K and moments of M/K, with the padding of rows, and one
block: what is whole at a time while a pass goes on.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcsgd.core.method import parts_of
from hpcsgd.core.optional import Stateful, memory_bytes
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.engine.plan import StepPlan


def kept(plan: StepPlan, m: ModelLayout, moments: float, *later: StepPlan) -> float:
    """Parameters and gradients of M elements each, `moments` for each element that a rank updates, and the
    vectors of the method's parts; of a model that torch shards a K-th, and `one_block`. Not activations, nor
    what else comes and goes within a step or a meeting.

    `later`: the stages that a run changes to. Parts with a memory keep it after the change, and so it adds
    up. What others keep is in the buckets, where the next stage finds it."""
    model = sum(m.here(b) for b in m.buckets)
    state = moments * (m.own_elements() if plan.grad_reduce.traits.shards else model)
    stages = [list(_parts(stage, m)) for stage in (plan, *later)]
    lasting = memory_bytes((part for parts in stages for part in parts if isinstance(part, Stateful)), m)
    passing = (
        memory_bytes((part for part in parts if not isinstance(part, Stateful)), m) for parts in stages
    )
    return 2 * model + state + lasting + max(passing) + one_block(m)


def _parts(plan: StepPlan, m: ModelLayout) -> Iterator[object]:
    """Those that act on P groups of K."""
    assert not plan.sequence, "each stage has parts of its own"
    of_step = [*parts_of("grad_reduce", plan.grad_reduce), *parts_of("schedule", plan.schedule)]
    of_meeting = parts_of("averager", plan.averager) if m.P > 1 else ()
    return (part for _, part in [*of_step, *of_meeting])


def one_block(m: ModelLayout) -> float:
    """The weights that torch has gathered at a time: the largest block, and what is outside all of them."""
    blocks = [unit.weights for unit in m.units if not unit.stays]
    return max(blocks, default=0) + sum(unit.weights for unit in m.units if unit.stays)
