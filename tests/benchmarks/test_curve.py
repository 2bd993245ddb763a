"""When a training reaches a score."""

from __future__ import annotations

import pytest

from harness.curve import reached


@pytest.mark.parametrize(
    ("scores", "target", "seconds"),
    [
        ((5.0, 6.0, 2.0), 5.0, 1.0),
        ((5.0, 6.0, 2.0), 4.0, 3.0),
        ((5.0, 6.0, 2.0), 1.9, None),
        ((5.0, 3.0, 4.0), 3.5, 1.75),
    ],
)
def test_a_score_is_linear_between_two_points(
    scores: tuple[float, ...], target: float, seconds: float | None
) -> None:
    assert reached((1.0, 2.0, 4.0), scores, target) == seconds
