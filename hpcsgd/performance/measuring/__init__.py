"""Measure messages and computation under the conditions of a job, and make a machine file."""

from hpcsgd.performance.measuring.run import measure, run

__all__ = ["measure", "run"]
