"""Bytes that a rank keeps from one step to the next: 2·M, moments of M or M/K, and what the method holds.

Where torch shards the model over the group it is 2·M/K and moments of M/K, with the padding of rows, and one
block: what is whole at a time while a pass goes on.
"""

from __future__ import annotations

from hpcsgd.core.method import parts_of
from hpcsgd.core.traffic import Sizes, held
from hpcsgd.engine.plan import StepPlan


def kept(plan: StepPlan, m: Sizes, moments: float) -> float:
    """Parameters and gradients of M elements each, `moments` for each element that a rank updates, and the
    vectors of the method's parts; of a model that torch shards a K-th, and `one_block`. Not activations, nor
    what else comes and goes within a step or a meeting."""
    exchange = plan.exchange
    model = sum(m.here(b) for b in m.buckets)
    state = moments * (m.owned() if exchange.traits.shards else model)
    parts = [part for _, part in [*parts_of("exchange", exchange), *parts_of("when", plan.schedule)]]
    if m.P > 1:
        parts += [part for _, part in parts_of("how", plan.averager)]
    return 2 * model + state + held(parts, m) + one_block(m)


def one_block(m: Sizes) -> float:
    """The weights that torch has gathered at a time: the largest block, and what is outside all of them."""
    blocks = [unit.weights for unit in m.units if not unit.stays]
    return max(blocks, default=0) + sum(unit.weights for unit in m.units if unit.stays)
