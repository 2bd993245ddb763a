"""What all benchmarks share. It alone interleaves and times steps, in timing.py, and starts programs, in
programs.py; record.py has what a result says of its run, load.py how busy others were."""

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
