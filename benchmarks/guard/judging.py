"""Evaluation of the rows of `guard.py`: the loss relative to the other groups alone, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from guard.training import CASES, GUARDED, METHODS, PLAIN, WITHOUT
from harness import Goal, Spread, ratios

Row = dict[str, Any]
LOSS = 1.01
"""Goal: loss with the guard over that of the run without the noisy group."""


def losses(rows: Sequence[Row], who: str, case: str) -> list[float]:
    """Return the loss of each seed, in the order of seeds."""
    mine = [row for row in rows if (row["who"], row["case"]) == (who, case)]
    return [row["test_loss"] for row in sorted(mine, key=lambda row: row["seed"])]


def judged(rows: Sequence[Row]) -> tuple[list[list[object]], list[Goal]]:
    """Return the rows of the table, and the goals."""
    lines: list[list[object]] = []
    goals: list[Goal] = []
    for who in METHODS:
        without = losses(rows, who, WITHOUT)
        for case in CASES[1:]:
            if mine := losses(rows, who, case):
                over = ratios(mine, without)
                lines.append([who, case, len(mine), f"{Spread.of(mine).median:.4f}", str(over)])
                goals.append(goal(who, case, over))
    return lines, goals


def goal(who: str, case: str, over: Spread) -> Goal:
    """Return the goal of `case`: with the guard a loss of at most `LOSS`, with the plain mean more."""
    if case == GUARDED:
        return Goal(f"{who}: loss with a guard over that without the group", over.median, LOSS)
    assert case == PLAIN
    return Goal(f"{who}: that of the run without the group over the plain mean's", 1 / over.median, 1 / LOSS)
