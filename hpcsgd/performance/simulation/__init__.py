"""Simulate a job event by event: which groups wait for which, for how long, and what failures cost.

A simulation covers what closed forms cannot: compute times that vary, stragglers, queues at a host's link,
groups that do not wait for each other, and failures. A method's plan says which groups wait for which
(`StepPlan.waits`). All seconds are inputs, because this package does not measure a machine or a model.
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
