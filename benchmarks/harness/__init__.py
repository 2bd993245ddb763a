"""The code that all benchmarks share.

Only timing.py interleaves and times steps, and only programs.py starts programs. record.py describes the run
that a result comes from. load.py measures how busy other processes keep the machine.
"""

from harness.launching import in_processes, mpiexec, on_ranks, start
from harness.record import Goal, Run
from harness.table import print_table
from harness.timing import Contestant, Spread, WallClock, interleaved, ratios

__all__ = [
    "Contestant",
    "Goal",
    "Run",
    "Spread",
    "WallClock",
    "in_processes",
    "interleaved",
    "mpiexec",
    "on_ranks",
    "print_table",
    "ratios",
    "start",
]
