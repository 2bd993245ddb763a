"""Bytes that a rank keeps from one step to the next: 2·M, moments of M or M/K, and what the method holds."""

from __future__ import annotations

from hpcsgd.core.method import Method, parts_of
from hpcsgd.core.traffic import Sizes, held
from hpcsgd.cost.traffic import exchange_of


def kept(method: Method, m: Sizes, moments: float, *, elementwise: bool = True) -> float:
    """Parameters and gradients of M elements each, `moments` for each element that a rank updates, and the
    vectors of the method's parts. Not activations, nor what comes and goes within a step or a meeting."""
    exchange = exchange_of(method, elementwise)
    model = m.K * m.owned()
    state = moments * (m.owned() if exchange.shards else model)
    parts = [part for _, part in [*parts_of("exchange", exchange), *parts_of("when", method.when)]]
    if m.P > 1:
        parts += [part for _, part in parts_of("how", method.how)]
    return 2 * model + state + held(parts, m)
