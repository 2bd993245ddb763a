"""What `ensemble.py --shares` computes from made-up rows."""

from __future__ import annotations

from typing import Any

import pytest

from ensemble.shares import HALVES, OVERLAPPING, SHARES, SYNC, behind


def row(who: str, seed: int, *accuracy: float) -> dict[str, Any]:
    return {"who": who, "seed": seed, "accuracy": list(accuracy)}


def test_points_behind_are_of_the_last_epochs_of_equal_seeds():
    rows = [
        row(SYNC, 1, 0.9, 0.50), row(SYNC, 2, 0.1, 0.60),
        row(HALVES, 1, 0.8, 0.47), row(HALVES, 2, 0.2, 0.59),
        row(OVERLAPPING, 1, 0.51), row(OVERLAPPING, 2, 0.62),
    ]  # fmt: skip
    assert behind(HALVES, rows) == pytest.approx(2.0)
    assert behind(OVERLAPPING, rows) == pytest.approx(-1.5)
    assert {SYNC, HALVES, OVERLAPPING} == SHARES.keys()
