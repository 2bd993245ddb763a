"""A job before it is run, event by event: who waits for whom, for how long, and what failures cost.

What closed forms cannot say: computing times that vary, stragglers, queues at a host's link, groups that do
not wait for each other, failures. Seconds come from outside; no machine, no model and no torch is known here.
"""

from hpcsgd.simulation.compute import Constant, Lasting, LogNormal, Measured, Wandering
from hpcsgd.simulation.durations import Durations, Layout, Message
from hpcsgd.simulation.failures import Failures
from hpcsgd.simulation.rules import RULES
from hpcsgd.simulation.simulate import Simulated, Simulation, simulate

__all__ = [
    "RULES",
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
