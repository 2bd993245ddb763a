"""What a run says when its distances are not those of the probe."""

from __future__ import annotations

import pytest

from hpcsgd.tuning.monitor import Promise

FULL = 0.4


@pytest.fixture
def promise() -> Promise:
    return Promise(P=4, D=1.0, lr=FULL)


def heard(promise: Promise, D: float, lr: float = FULL, meetings: int = 4) -> list[str]:
    told = [promise.hear(D, lr) for _ in range(meetings)]
    return [one for one in told if one is not None]


def test_as_promised_there_is_nothing_to_say(promise: Promise) -> None:
    assert not heard(promise, 1.0) + heard(promise, 1.9) + heard(promise, 0.6)


def test_groups_that_walk_apart_are_told_of_once(promise: Promise) -> None:
    (told,) = heard(promise, 2.5, meetings=10)
    assert told.startswith(
        "the groups are further apart than probed (D = 2.5, the probe saw 1 with 4 groups)"
    )
    (told,) = heard(promise, 1.2, meetings=10)
    assert told.startswith("the groups are as far apart as probed again")


def test_also_at_a_lower_rate(promise: Promise) -> None:
    assert heard(promise, 2.5, lr=0.1)


def test_one_meeting_is_not_enough(promise: Promise) -> None:
    assert not heard(promise, 1.0) + heard(promise, 9.0, meetings=1) + heard(promise, 1.0)


def test_groups_that_stay_close(promise: Promise) -> None:
    (told,) = heard(promise, 0.4)
    assert told.startswith("the groups are closer than probed (D = 0.4")


def test_close_groups_are_no_news_at_a_low_rate(promise: Promise) -> None:
    """During the warm-up, and once the rate has decayed."""
    assert not heard(promise, 0.1, lr=0.1)
    assert not heard(promise, 1.0) + heard(promise, 0.1, lr=0.04, meetings=10)


def test_from_far_to_close_at_a_low_rate(promise: Promise) -> None:
    heard(promise, 3.0)
    (told,) = heard(promise, 0.1, lr=0.04, meetings=10)
    assert "as far apart as probed again" in told


def test_a_P_that_was_not_probed_or_diverged_promises_nothing() -> None:
    rows = [{"P": 2, "D": 1.0, "lr": 0.2, "diverged": None}, {"P": 4, "D": 2.0, "lr": 0.4, "diverged": "nan"}]
    assert Promise.read({"rows": rows}, 2) == Promise(2, 1.0, 0.2)
    assert Promise.read({"rows": rows}, 4) is None
    assert Promise.read({"rows": rows}, 3) is None
