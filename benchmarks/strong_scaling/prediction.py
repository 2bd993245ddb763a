"""Predictions of `hpcsgd plan` for `strong_scaling.py`, from constants that were not measured."""

from __future__ import annotations

from collections.abc import Mapping

from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost.link_classes import Kind
from hpcsgd.cost.links import Link
from hpcsgd.cost.machine import About, Machine
from hpcsgd.cost.price import Computed, price
from hpcsgd.engine.plan import StepPlan
from step_time.networks import FORWARD, Compute
from strong_scaling.places import BITS, BUCKET_MB, RANKS_PER_HOST, Place, hosts, network

LATENCY = 2e-4
"""Seconds of a message, by the communication thread and TCP."""
PAYLOAD = 0.95
"""Share of payload in what leaves a host; the rest is headers."""
MEMORY = 1e-9
"""Seconds per byte inside a host."""
LINK = 8 / BITS / PAYLOAD
"""Seconds per byte that leaves a host."""
LINKS: Mapping[Kind, float] = {"inside": MEMORY, "across": LINK, "mixed": LINK}


def predicted(place: Place, compute: float) -> float:
    """Return the seconds of a step in which a rank computes for `compute`."""
    N = place.P * place.K
    links = tuple(
        Link(operation="any", kind=kind, alpha_seconds=(LATENCY,), beta_seconds_per_byte=(beta,))
        for kind, beta in LINKS.items()
    )
    machine = Machine(machine=About(hosts=hosts(N), ranks_per_host=N // hosts(N)), link=links)
    named = network(Compute(compute)).named_parameters()
    m = ModelLayout.of(named, place.P, place.K, BUCKET_MB * 1e6, ranks_per_host=machine.ranks_per_host)
    own = Computed(FORWARD * compute, (1 - FORWARD) * compute)
    return price(StepPlan.of(place.method()), m, machine, own, ranks_per_host=min(RANKS_PER_HOST, N)).seconds
