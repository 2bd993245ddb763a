"""A job before it is run, event by event: who waits for whom, for how long, and what failures cost.

What closed forms cannot say: computing times that vary, stragglers, queues at a host's link, groups that do
not wait for each other, failures. Who waits for whom is told by a method's plan (`StepPlan.waits`). Seconds
come from outside; no machine and no model is known here.
"""

from hpcsgd.performance.simulation.compute import Constant, Lasting, LogNormal, Measured, Wandering
from hpcsgd.performance.simulation.durations import Durations, Layout, Message
from hpcsgd.performance.simulation.failures import Failures
from hpcsgd.performance.simulation.simulate import Simulated, Simulation, simulate

__all__ = [
    "Constant",
    "Durations",
    "Failures",
    "Lasting",
    "Layout",
    "LogNormal",
    "Measured",
    "Message",
    "Simulated",
    "Simulation",
    "Wandering",
    "simulate",
]
