"""The bytes that a rank keeps between steps: model, gradients, optimizer state, the method's vectors.

With M elements in a model and K ranks in a group, parameters and gradients together have 2·M elements. The
rank has optimizer state for the M or M/K elements that it updates. With an FSDP model a rank has 2·M/K
elements and optimizer state for M/K, including padding of rows, and during a pass the gathered weights of one
unit.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcsgd.core.method import parts_of
from hpcsgd.core.optional import Stateful, memory_bytes
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.engine.plan import StepPlan


def kept(plan: StepPlan, m: ModelLayout, moments: float, *later: StepPlan) -> float:
    """Return the bytes of parameters, gradients, optimizer state and the vectors of the method's parts.

    For an FSDP model these are a K-th of the parameters and gradients, plus `one_block`. Activations and
    other memory that is freed within a step or a synchronization do not count.

    `moments`: number of values in the optimizer's state for each element that a rank updates. `later`: the
    plans of the stages to which a run changes. Parts of the method that have a state keep their memory after
    such a change, so the memory of all stages adds up. The vectors of other parts are in the buckets, where
    the next stage reuses them.
    """
    model = sum(m.here(b) for b in m.buckets)
    state = moments * (m.own_elements() if plan.grad_reduce.traits.leaves_shards else model)
    stages = [list(_parts(stage, m)) for stage in (plan, *later)]
    lasting = memory_bytes((part for parts in stages for part in parts if isinstance(part, Stateful)), m)
    passing = (
        memory_bytes((part for part in parts if not isinstance(part, Stateful)), m) for parts in stages
    )
    return 2 * model + state + lasting + max(passing) + one_block(m)


def _parts(plan: StepPlan, m: ModelLayout) -> Iterator[object]:
    """Yield the parts of the plan's method; the averager and its parts only if there are several groups."""
    assert not plan.sequence, "each stage has parts of its own"
    of_step = [*parts_of("grad_reduce", plan.grad_reduce), *parts_of("schedule", plan.schedule)]
    of_sync = parts_of("averager", plan.averager) if m.P > 1 else ()
    return (part for _, part in [*of_step, *of_sync])


def one_block(m: ModelLayout) -> float:
    """Return the bytes of weights that an FSDP model has gathered: the largest unit, and those that stay."""
    blocks = [unit.weights for unit in m.units if not unit.stays]
    return max(blocks, default=0) + sum(unit.weights for unit in m.units if unit.stays)
