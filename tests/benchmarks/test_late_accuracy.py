"""The batches of `late_accuracy.py`, and how it judges its rows."""

from __future__ import annotations

from typing import Any

import pytest

from late_accuracy.judging import judged
from late_accuracy.tasks import TASKS, windows
from late_accuracy.training import GROUPS, batches, rate

CIFAR, TEXT = "cifar10", "characters"


def row(task: str, who: str, seed: int, accuracy: float, loss: float) -> dict[str, Any]:
    return {"task": task, "who": who, "seed": seed, "accuracy": accuracy, "test_loss": loss}


def test_groups_share_the_samples_of_an_epoch():
    task = TASKS[CIFAR]
    step = GROUPS * task.batch
    of_groups = [batches(task, 5 * step + 3, 1, g) for g in range(GROUPS)]
    assert {len(mine) for mine in of_groups} == {5 * task.epochs}
    for epoch in range(task.epochs):
        seen = [i for mine in of_groups for rows in mine[5 * epoch : 5 * epoch + 5] for i in rows.tolist()]
        assert len(set(seen)) == len(seen) == 5 * step


def test_the_rate_rises_and_falls_to_nothing():
    rates = [rate((t + 1) / 100) for t in range(100)]
    assert rates.index(max(rates)) == 4
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.0)


def test_the_next_character_is_asked_for():
    x, y = windows("ab" * 64 + "c", {"a": 0, "b": 1}, 2)
    assert x.tolist() == [[0, 1] * 32] * 2
    assert y.flatten().tolist() == [1, 0] * 63 + [1, 63]


def test_points_and_losses_are_compared_seed_by_seed():
    rows = [row(CIFAR, "plain", 1, 0.50, 1.0), row(CIFAR, "plain", 2, 0.60, 1.0)]
    rows += [row(CIFAR, "4 bits", 2, 0.58, 1.0)]
    rows += [row(TEXT, "plain", 1, 0.5, 2.0), row(TEXT, "streaming", 1, 0.5, 2.02)]
    _, goals = judged(rows, TASKS)
    assert [goal.value for goal in goals] == pytest.approx([2.0, 1.01])
    assert [goal.met for goal in goals] == [False, False]
