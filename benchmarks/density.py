"""Actual densities of sparsifiers with 16 workers, their remaining errors, and their accuracy.

    hpcsgd data convert cifar10 ARCHIVE DATA/cifar10.h5       and in the same way mnist, wikitext
    python benchmarks/density.py --data DATA [--json FILE] [--plot FILE]

Top-k, CLT-k, DEFT, MiCRO, ExDyna, SIDCo and the hard threshold are compared with dense SGD. The three tasks
are small versions of real ones, at the densities of the DEFT paper (its figures 3 to 5, 16 GPUs). The paper's
third task is NCF on MovieLens, at d = 0.1; here it is a CNN on MNIST. The workers are virtual and form one
group. Real ranks repeat the first steps, and the results are compared.

With --partition "by label" each worker has one label. --json FILE is written after every training. With
--keep FILE, trainings of the same setting that are in the file are not repeated, except those that --again
names. --quick takes a minute and only shows that the benchmark runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

from density import picture
from density.tasks import TASKS
from density.training import (
    BY_LABEL,
    CLT_K,
    CONTESTANTS,
    DEFT,
    DENSE,
    SHUFFLED,
    TOP_K,
    difference,
    measure,
)
from harness import Goal, Run, in_processes, print_table

Row = dict[str, Any]
Setting = tuple[int, int]
"""The number of samples and of epochs."""
WORDS_TASK = "wikitext2"
QUICK = 640
POINTS_BEHIND = 0.5
PERPLEXITY = 1.05
"""The limit for a language model, as a multiple of dense SGD's perplexity; it corresponds to half a point."""
CONSTANT = 1.05
SAME = 1e-4
HEAD = (
    "task,who,set density,actual,actual/set,at most,paper,‖e‖ at the end,accuracy %,points behind,perplexity"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Actual densities and errors of sparsifiers.")
    parser.add_argument(
        "--data", type=Path, default=Path(), help="folder: cifar10.h5, wikitext2.h5, mnist.h5"
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--partition", choices=[SHUFFLED, BY_LABEL], default=SHUFFLED)
    parser.add_argument("--processes", type=int, default=2, help="number of simultaneous trainings")
    parser.add_argument("--times", type=int, default=1, help="factor on the epochs, for more cores")
    parser.add_argument("--quick", action="store_true", help="check within a minute that it runs")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="an earlier --json file")
    parser.add_argument(
        "--again", nargs="+", metavar="TASK:WHO", default=[], help="repeat these although they are kept"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.partition == BY_LABEL and WORDS_TASK in given.tasks:
        parser.error(f"{WORDS_TASK} has no labels: leave it out of --tasks")
    run = Run(timed=False)
    apart = difference(given.data, given.partition)
    settings = {
        name: (QUICK, 1) if given.quick else (TASKS[name].count, given.times * TASKS[name].epochs)
        for name in given.tasks
    }
    kept = alike(run.kept(given.keep), given.partition, settings)
    rows = [row for row in kept if named(row) not in given.again]
    for row in in_processes(given.processes, missing(rows, given.data, given.partition, settings)):
        rows.append(row)
        print(f"{row['task']}, {row['who']}: {row['seconds']:.0f} s", flush=True)
        if given.json:
            run.write(given.json, rows)
    rows = compared(rows)
    print_table([cells(row) for row in rows], HEAD.split(","))
    goals = [Goal("relative difference of virtual workers from real ranks", apart, SAME), *goals_of(rows)]
    run.conclude(rows, goals, given.json)
    if given.plot:
        picture.draw(given.plot, rows)


def alike(rows: Sequence[Row], partition: str, settings: Mapping[str, Setting]) -> list[Row]:
    """Return the rows of the same setting."""
    divided = [row for row in rows if row.setdefault("partition", SHUFFLED) == partition]
    return [row for row in divided if (row["samples"], row["epochs"]) == settings.get(row["task"])]


def named(row: Row) -> str:
    return f"{row['task']}:{row['who']}"


def missing(
    rows: Sequence[Row], data: Path, partition: str, settings: Mapping[str, Setting]
) -> list[partial[Row]]:
    """Return the trainings still to do."""
    there = {(row["task"], row["who"]) for row in rows}
    wanted = [(name, who) for name in settings for who in CONTESTANTS if (name, who) not in there]
    return [partial(measure, name, who, data, partition, *settings[name]) for name, who in wanted]


def compared(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in order, each with how far it is behind dense SGD."""
    of = {(row["task"], row["who"]): row for row in rows}
    ordered = [of[name, who] for name in TASKS for who in CONTESTANTS if (name, who) in of]
    for row in ordered:
        row["points_behind"] = 100 * (of[row["task"], DENSE]["accuracy"] - row["accuracy"])
        if row["task"] == WORDS_TASK:
            row["perplexity"] = exp(row["test_loss"])
    return ordered


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    found = []
    for name in dict.fromkeys(row["task"] for row in rows):
        task = TASKS[name]
        of: Mapping[str, Row] = {row["who"]: row for row in rows if row["task"] == name}
        points = of[DEFT]["points_behind"]
        found.append(Goal(f"{task.title}: points of accuracy of DEFT behind dense", points, POINTS_BEHIND))
        if "perplexity" in of[DEFT]:
            times = of[DEFT]["perplexity"] / of[DENSE]["perplexity"]
            found.append(Goal(f"{task.title}: perplexity of DEFT over dense", times, PERPLEXITY))
        found += [
            Goal(f"{task.title}: actual over set density of {who}", of[who]["ratio"], CONSTANT)
            for who in (DEFT, CLT_K)
        ]
        built_up = task.paper / 2 / of[TOP_K]["ratio"]
        found.append(Goal(f"{task.title}: half the paper's build-up of Top-k over ours", built_up, 1))
    return found


def cells(row: Row) -> list[object]:
    task, dense = TASKS[row["task"]], row["who"] == DENSE
    paper = {TOP_K: f"{task.paper:g}", CLT_K: "1", DEFT: "1"}
    return [
        task.title, row["who"], f"{task.density:g}",
        *(["1", "–", "–"] if dense else
          [f"{row['density']:.3g}", f"{row['ratio']:.2f}", f"{row['highest_ratio']:.2f}"]),
        paper.get(row["who"], "–"), "–" if dense else f"{row['error']:.3g}",
        f"{100 * row['accuracy']:.2f}", f"{row['points_behind']:.2f}",
        f"{row['perplexity']:.1f}" if "perplexity" in row else "–",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
