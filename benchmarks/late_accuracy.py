"""The accuracy that delayed synchronizations and quantization cost, after the same number of steps.

    hpcsgd data convert cifar10 ARCHIVE DATA/cifar10.h5       and in the same way wikitext, as wikitext2.h5
    python benchmarks/late_accuracy.py --data DATA [--json FILE]

Four groups of one rank synchronize every 8 steps. The contestants are the plain method (`hierarchical`);
delays of 1 and of 4 steps; streaming, with 4 fragments that arrive after 2 steps; and averages quantized to 8
and to 4 bits, with error feedback. All have the same initial weights, samples and learning rates. The tasks
are ResNet-20 on images of CIFAR-10, with every four pixels averaged to one, and an LSTM on characters of
WikiText-2. The final model, which is the mean of the groups, is evaluated on the test split.

The benchmark takes a quarter of an hour on two cores. --tasks, --who, --seeds and --keep select parts of it,
and --json FILE is written after every training. --times 4 trains for four times as many epochs. --quick
trains on digits; it takes seconds and only shows that the benchmark runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import Run, print_table
from late_accuracy.judging import judged
from late_accuracy.tasks import QUICK, TASKS, Task
from late_accuracy.training import CONTESTANTS, measure

Row = dict[str, Any]
Name = tuple[str, str, int]
SEEDS = (1, 2, 3)
HEAD = ["task", "who", "seeds", "accuracy % / loss", "of the seeds", "points behind / over plain ± its error"]


def alike(row: Row, tasks: Mapping[str, Task]) -> bool:
    """Return whether a row is of a setting that is measured now."""
    task = tasks.get(row["task"])
    return task is not None and (row["samples"], row["epochs"]) == (task.count, task.epochs)


def named(row: Row) -> Name:
    return row["task"], row["who"], row["seed"]


def main() -> None:
    everybody = list(CONTESTANTS)
    parser = argparse.ArgumentParser(description="Accuracy lost by delays and quantization.")
    parser.add_argument("--data", type=Path, default=Path(), help="folder: cifar10.h5, wikitext2.h5")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--who", nargs="+", choices=everybody, default=everybody, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--times", type=int, default=1, help="factor on the number of epochs")
    parser.add_argument("--quick", action="store_true", help="check within seconds that it runs")
    parser.add_argument(
        "--keep", type=Path, nargs="+", metavar="FILE", default=[], help="earlier --json files"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    chosen = QUICK if given.quick else {name: TASKS[name] for name in given.tasks}
    tasks = {name: replace(task, epochs=given.times * task.epochs) for name, task in chosen.items()}
    seeds = given.seeds[:1] if given.quick else given.seeds
    run = Run(timed=False)
    rows = [row for file in given.keep for row in run.kept(file) if alike(row, tasks)]
    there = {named(row) for row in rows}
    for name, who, seed in ((name, who, seed) for seed in seeds for who in given.who for name in tasks):
        if (name, who, seed) in there:
            continue
        row = {"task": name, **measure(tasks[name], who, seed, given.data)}
        found = f"{row['accuracy']:.4f}, {row['test_loss']:.4f} in {row['seconds']:.0f} s"
        print(f"{name}, {who}, seed {seed}: {found}", flush=True)
        rows.append(row)
        if given.json:
            run.write(given.json, rows)
    order = [*tasks, *CONTESTANTS]
    rows.sort(key=lambda row: (order.index(row["task"]), order.index(row["who"]), row["seed"]))
    lines, goals = judged(rows, tasks)
    print_table(lines, HEAD)
    run.conclude(rows, goals, given.json)


if __name__ == "__main__":
    main()
