"""Simulated seconds equal, to the last bit, those of the former implementation by a table of rules."""

from __future__ import annotations

import pytest

from hpcsgd.core import graphs
from hpcsgd.engine.plan import StepPlan
from hpcsgd.methods import (
    Method,
    ad_psgd,
    allreduce_local_sgd,
    async_sgd,
    bsp,
    d_psgd,
    delayed,
    hierarchical,
    osgp,
    sgp,
    ssp,
)
from hpcsgd.performance.simulation import Durations, Lasting, Layout, Measured, Message, Simulation, simulate

RECORDED: list[tuple[Method, float, float]] = [
    (bsp(), 28.45999999999999, 1.756851721714688),
    (hierarchical(sync_every=4), 26.310000000000013, 1.9171438235412437),
    (hierarchical(sync_every=7), 26.10000000000002, 1.9225248094692158),
    (allreduce_local_sgd(sync_every=3), 26.500000000000014, 1.9032778243283037),
    (delayed(method=hierarchical(sync_every=4), sync_delay=2), 25.73000000000002, 1.9762328817019292),
    (delayed(method=hierarchical(sync_every=4), sync_delay=4), 25.73000000000002, 2.066974315948387),
    (delayed(method=hierarchical(sync_every=1), sync_delay=1), 25.73000000000002, 1.9551538010993137),
    (sgp(), 29.248000000000072, 1.714740245986359),
    (sgp(peers=2), 29.245000000000076, 1.713212591410079),
    (osgp(overlap_steps=1), 25.73000000000002, 1.9888260634515729),
    (osgp(overlap_steps=3, graph=graphs.PowersOfTwo(2)), 25.73000000000002, 2.09219585204433),
    (d_psgd(), 29.63700000000007, 1.693074264439161),
    (d_psgd(graph=graphs.UndirectedExponential()), 29.207000000000072, 1.7148582832650803),
    (ssp(max_staleness=0), 30.280000000000083, 1.6512549537648569),
    (ssp(max_staleness=3), 28.883000000000067, 1.7946715577765768),
    (async_sgd(), 28.968000000000067, 3.5314931717861917),
    (ad_psgd(), 25.73000000000002, 4.575318597520627),
]
"""Methods, each with the seconds until the last group has ended, and the steps per second of a group."""
DURATIONS = Durations(
    grad_reduce=0.011,
    update=0.003,
    model_average=0.04,
    gather=0.007,
    message=Message(latency=1e-2, link=5e-2),
)


@pytest.mark.parametrize(("method", "seconds", "rate"), RECORDED)
def test_the_seconds_are_those_of_before(method: Method, seconds: float, rate: float) -> None:
    simulated = simulate(
        Simulation(
            layout=Layout(9, 2, 6),
            compute=Measured([0.05, 0.07, 0.11, 0.13, 0.29]),
            stragglers=Lasting(4.0, ranks=[0]),
            durations=DURATIONS,
            waits=StepPlan.of(method).waits,
            steps=50,
            seed=5,
        )
    )
    assert (simulated.seconds, simulated.steps_per_second) == (seconds, rate)
