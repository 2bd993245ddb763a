"""What messages and computing take here, measured as a job would have them: the machine file's maker."""

from hpcsgd.performance.measuring.run import measure, run

__all__ = ["measure", "run"]
