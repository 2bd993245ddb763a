"""The time that hpcsgd adds to a training step: one rank compared with plain torch, four with DDP.

    python benchmarks/step_overhead.py [--quick] [--json FILE]

Contestants take turns in the same processes, so that other load of the machine cancels in their ratios. The
floor of a step is the time that the ranks need without communication, all running at once, plus one copy in
memory of every byte sent. Nothing of it is hidden behind computation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import Run, print_table
from step_overhead.rows import HEAD, cells, goals, measured

RANKS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description="Time that hpcsgd adds to a training step.")
    parser.add_argument("--quick", action="store_true", help="check within a minute that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    run = Run()
    if arguments.quick:
        rows, _ = measured(1, rounds=3, steps=2, timeout=120)
        more, rates = measured(RANKS, rounds=2, steps=1, timeout=240)
    else:
        rows, _ = measured(1, rounds=16, steps=4, timeout=1800)
        more, rates = measured(RANKS, rounds=10, steps=3, timeout=3600)
    rows += more
    print_table(map(cells, rows), HEAD)
    print(", ".join(f"{name} {rate / 1e9:.2f} GB/s a rank" for name, rate in rates.items()))
    run.conclude(rows, goals(rows), arguments.json, {"bytes_a_second_a_rank": rates})


if __name__ == "__main__":
    main()
