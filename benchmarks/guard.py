"""The harm that noise in one group does to the others, with the plain mean and with a guard.

    python benchmarks/guard.py [--json FILE]

Four groups of one rank train a perceptron on handwritten digits, and synchronize every 4 steps. From step 200
of 600 on, one of them sees random pixels with random labels. Three trainings are compared: with the plain
mean, with `PseudoGradientPenalty()`, and by the other three groups alone. Each figure is the loss on the test
split after the last ten synchronizations, divided by that of the other groups alone. The table shows the
median and quartiles over three seeds.

Groups are threads of one process. The benchmark takes minutes on two cores. --who and --seeds select parts of
it, and --keep FILE continues where an earlier --json FILE ended. --quick takes seconds and only shows that it
runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from guard.judging import judged
from guard.training import CASES, FULL, METHODS, QUICK, Setting, digits, measure
from harness import Run, print_table

Row = dict[str, Any]
SEEDS = (1, 2, 3)
HEAD = ["method", "mean", "seeds", "loss", "over that without the group (quartiles)"]


def named(row: Row) -> tuple[str, str, int]:
    return row["who"], row["case"], row["seed"]


def is_of_now(row: Row, setting: Setting) -> bool:
    """Return whether a row is of a training that would be the same today."""
    known = row["who"] in METHODS and row["case"] in CASES
    return known and (row["steps"], row["noise_from"]) == (setting.steps, setting.noise_from)


def main() -> None:
    parser = argparse.ArgumentParser(description="How much noise in one group harms the others.")
    parser.add_argument("--who", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="check within seconds that it runs")
    parser.add_argument(
        "--keep", type=Path, nargs="+", metavar="FILE", default=[], help="earlier --json files"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    setting, seeds = (QUICK, given.seeds[:1]) if given.quick else (FULL, given.seeds)
    samples, run = digits(), Run(timed=False)
    rows = [row for file in given.keep for row in run.kept(file) if is_of_now(row, setting)]
    there = {named(row) for row in rows}
    for who, seed, case in ((who, seed, case) for who in given.who for seed in seeds for case in CASES):
        if (who, case, seed) in there:
            continue
        row = measure(setting, samples, who, case, seed)
        found = f"{row['test_loss']:.4f}, left out {row['left_out']:.0f} times, in {row['seconds']:.0f} s"
        print(f"{who}, {case}, seed {seed}: {found}", flush=True)
        rows.append(row)
        if given.json:
            run.write(given.json, rows)
    lines, goals = judged(rows)
    print_table(lines, HEAD)
    run.conclude(rows, goals, given.json)


if __name__ == "__main__":
    main()
