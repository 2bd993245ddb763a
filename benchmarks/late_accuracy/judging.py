"""Evaluation of the rows of `late_accuracy.py`: the difference from the plain method, seed by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from harness import Goal
from late_accuracy.tasks import Task
from late_accuracy.training import CONTESTANTS, PLAIN

Row = dict[str, Any]
POINTS_BEHIND, LOSS = 0.3, 1.005
"""Goals: points of accuracy behind the plain method, and loss relative to it."""


def figures(rows: Sequence[Row], task: Task) -> dict[int, float]:
    """Return the loss of each seed, or the accuracy in points."""
    return {row["seed"]: row["test_loss"] if task.by_loss else 100 * row["accuracy"] for row in rows}


def behind(mine: Mapping[int, float], plain: Mapping[int, float], task: Task) -> list[float]:
    """Return, for each seed that both have, the loss relative to plain, or the points behind it."""
    both = sorted(mine.keys() & plain.keys())
    return [mine[seed] / plain[seed] if task.by_loss else plain[seed] - mine[seed] for seed in both]


def judged(rows: Sequence[Row], tasks: Mapping[str, Task]) -> tuple[list[list[object]], list[Goal]]:
    """Return the rows of the table, and the goals."""
    lines: list[list[object]] = []
    goals = []
    for name, task in tasks.items():
        own = [row for row in rows if row["task"] == name]
        of = {who: figures([row for row in own if row["who"] == who], task) for who in CONTESTANTS}
        for who, mine in of.items():
            if apart := behind(mine, of[PLAIN], task):
                lines.append([task.title, who, *cells(list(mine.values()), apart, task)])
                if who != PLAIN:
                    goals.append(goal(task, who, mean(apart)))
    return lines, goals


def goal(task: Task, who: str, apart: float) -> Goal:
    if task.by_loss:
        return Goal(f"{task.title}: loss of {who} over plain", apart, LOSS)
    return Goal(f"{task.title}: points of accuracy of {who} behind plain", apart, POINTS_BEHIND)


def cells(values: Sequence[float], apart: Sequence[float], task: Task) -> list[object]:
    """Return the mean, the range over seeds, and the difference from plain with its standard error."""
    digits = 4 if task.by_loss else 2
    spread = f"{min(values):.{digits}f}–{max(values):.{digits}f}"
    difference = f"{mean(apart):.{digits}f}"
    if len(apart) > 1:
        difference += f" ± {stdev(apart) / len(apart) ** 0.5:.{digits}f}"
    return [len(values), f"{mean(values):.{digits}f}", spread, difference]
