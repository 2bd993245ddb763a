"""Tests of what a run reports if its distances differ from those of the probe."""

from __future__ import annotations

import pytest

from hpcsgd.train.monitor import DistanceMonitor

FULL = 0.4


@pytest.fixture
def monitor() -> DistanceMonitor:
    return DistanceMonitor(P=4, D=1.0, lr=FULL)


def heard(monitor: DistanceMonitor, D: float, lr: float = FULL, num_syncs: int = 4) -> list[str]:
    told = [monitor.hear(D, lr) for _ in range(num_syncs)]
    return [one for one in told if one is not None]


def test_as_probed_there_is_nothing_to_say(monitor: DistanceMonitor) -> None:
    assert not heard(monitor, 1.0) + heard(monitor, 1.9) + heard(monitor, 0.6)


def test_groups_whose_distance_grows_are_reported_once(monitor: DistanceMonitor) -> None:
    (told,) = heard(monitor, 2.5, num_syncs=10)
    assert told.startswith(
        "the distance between groups is larger than probed (D = 2.5, the probe saw 1 with 4 groups)"
    )
    (told,) = heard(monitor, 1.2, num_syncs=10)
    assert told.startswith("the distance between groups is as probed again")


def test_also_at_a_lower_rate(monitor: DistanceMonitor) -> None:
    assert heard(monitor, 2.5, lr=0.1)


def test_one_synchronization_is_not_enough(monitor: DistanceMonitor) -> None:
    assert not heard(monitor, 1.0) + heard(monitor, 9.0, num_syncs=1) + heard(monitor, 1.0)


def test_groups_that_stay_close(monitor: DistanceMonitor) -> None:
    (told,) = heard(monitor, 0.4)
    assert told.startswith("the distance between groups is smaller than probed (D = 0.4")


def test_close_groups_are_no_news_at_a_low_rate(monitor: DistanceMonitor) -> None:
    """During the warm-up, and after the rate has decayed, small distances are not reported."""
    assert not heard(monitor, 0.1, lr=0.1)
    assert not heard(monitor, 1.0) + heard(monitor, 0.1, lr=0.04, num_syncs=10)


def test_from_far_to_close_at_a_low_rate(monitor: DistanceMonitor) -> None:
    heard(monitor, 3.0)
    (told,) = heard(monitor, 0.1, lr=0.04, num_syncs=10)
    assert "is as probed again" in told


def test_a_P_that_was_not_probed_or_diverged_promises_nothing() -> None:
    rows = [{"P": 2, "D": 1.0, "lr": 0.2, "diverged": None}, {"P": 4, "D": 2.0, "lr": 0.4, "diverged": "nan"}]
    assert DistanceMonitor.read({"rows": rows}, 2) == DistanceMonitor(2, 1.0, 0.2)
    assert DistanceMonitor.read({"rows": rows}, 4) is None
    assert DistanceMonitor.read({"rows": rows}, 3) is None
