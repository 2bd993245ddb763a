"""What late meetings and narrow wires cost in accuracy, after equal steps:

    hpcsgd data convert cifar10 ARCHIVE DATA/cifar10.h5       and so wikitext, as wikitext2.h5
    python benchmarks/late_accuracy.py --data DATA [--json FILE]

Four groups of one rank meet every 8 steps: plain (`hierarchical`); delayed by 1 and by 4 steps; streamed, 4
fragments that arrive after 2 steps; and by wires of 8 and of 4 bits, with error feedback. The same weights,
samples and rates for all. ResNet-20 on images of CIFAR-10 of which four pixels are one, and an LSTM on
characters of WikiText-2; the last model of the training, the mean of the groups, on what is there to test.

A quarter of an hour on two cores; --tasks, --who, --seeds and --keep divide it, and --json FILE is written
after every training. --times 4: four times as many epochs. --quick: seconds, of digits (that it runs, not
what it measures).
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
    """Whether it is of a setting that is measured now."""
    task = tasks.get(row["task"])
    return task is not None and (row["samples"], row["epochs"]) == (task.count, task.epochs)


def named(row: Row) -> Name:
    return row["task"], row["who"], row["seed"]


def main() -> None:
    everybody = list(CONTESTANTS)
    parser = argparse.ArgumentParser(description="What late meetings and narrow wires cost in accuracy.")
    parser.add_argument("--data", type=Path, default=Path(), help="folder: cifar10.h5, wikitext2.h5")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--who", nargs="+", choices=everybody, default=everybody, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--times", type=int, default=1, help="as many epochs")
    parser.add_argument("--quick", action="store_true", help="seconds: that it runs, not what it measures")
    parser.add_argument("--keep", type=Path, nargs="+", metavar="FILE", default=[], help="of earlier --json")
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
