"""The time that `NaturalGradient` adds to a training step of plain SGD, on one rank.

    python benchmarks/natural_gradient.py [--quick] [--json FILE]

Contestants take turns in one process, so that other load of the machine cancels in their ratios. Only steps
after the first ten are timed. The first ten update every estimate; later ones update a quarter of the layers
per step, in turn.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import hpcsgd
from harness import Contestant, Goal, Run, Spread, interleaved, print_table, ratios
from harness.workloads import WORKLOADS, Step, Workload, plain, sgd
from hpcsgd.engine.natural_gradient.optimizer import EVERY_TIME
from hpcsgd.train.process import keep_freed_memory

RANKS = (20, 40)
"""The ranks of the estimates, as numbers of directions."""
LARGEST = {"ResNet-20": 1.2, "MLP 25M": 1.6}
"""Goals: ratios of seconds per step at the first of these ranks."""


def natural(workload: Workload, rank: int) -> Step:
    model = workload.model()
    optimizer = hpcsgd.NaturalGradient(sgd(model), model, rank=rank)
    step = workload.training(model, optimizer)
    step()
    optimizer.resume_from({**optimizer.estimates(), "t": EVERY_TIME})
    return step


def measured(workload: Workload, rounds: int, steps: int) -> list[dict[str, Any]]:
    training = {"plain SGD": plain(workload)}
    training |= {f"natural gradient, rank {rank}": natural(workload, rank) for rank in RANKS}
    contestants = {name: Contestant(step, steps) for name, step in training.items()}
    blocks = interleaved(contestants, rounds=rounds)
    baseline = blocks["plain SGD"].wall
    return [
        {
            "model": workload.name,
            "who": name,
            "rounds": rounds,
            "steps_a_round": steps,
            "seconds_a_step": asdict(Spread.of(times.wall)),
            "ratio": asdict(ratios(times.wall, baseline)),
        }
        for name, times in blocks.items()
    ]


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    return [
        Goal(f"{row['model']}: {row['who']} over plain SGD", row["ratio"]["median"], LARGEST[row["model"]])
        for row in rows
        if row["who"].endswith(f"rank {RANKS[0]}")
    ]


def cells(row: dict[str, Any]) -> list[object]:
    milliseconds = f"{1e3 * row['seconds_a_step']['median']:.1f}"
    return [row["model"], row["who"], milliseconds, str(Spread(**row["ratio"]))]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time that NaturalGradient adds to a training step.")
    parser.add_argument("--quick", action="store_true", help="check within half a minute that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    run = Run()
    rows: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        # A block covers all layers' turns a whole number of times.
        rows += measured(workload, rounds=3 if arguments.quick else 16, steps=4)
    print_table(map(cells, rows), ["model", "who", "ms/step", "ratio (quartiles)"])
    run.conclude(rows, goals(rows), arguments.json)


if __name__ == "__main__":
    main()
