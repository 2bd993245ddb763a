"""Tests of what the distances say about P."""

from __future__ import annotations

import math

import pytest

from hpcsgd.train.growth import THRESHOLD, Growth, Verdict, growth, growths_of, ideal, is_flat, verdict


def series(*distances: float) -> dict[int, list[list[float]]]:
    """Return P = 2, 4, 8, … with these distances, constant over five synchronizations of one seed."""
    return {2 ** (i + 1): [[D] * 5] for i, D in enumerate(distances)}


def test_the_paper_on_cifar10() -> None:
    """The distances are read from figure 4: 0.85, 1.95, 3.2, then flat. The paper's answer is 4."""
    assert verdict(2, growths_of(series(0.85, 1.95, 3.2, 3.2))) == Verdict(4, None, final=True)


def test_the_paper_on_div2k() -> None:
    """The distances are 0.025, 0.055, 0.10, and much lower at 16. The paper's answer is 8."""
    assert verdict(2, growths_of(series(0.025, 0.055, 0.10, 0.04))) == Verdict(8, None, final=True)


def test_one_P_alone_says_nothing() -> None:
    assert verdict(2, []) == Verdict(2, None, final=False)


def test_the_ratio_of_growth() -> None:
    (step,) = growths_of(series(1.0, 1.5))
    assert (step.P, step.further, step.rho) == (2, 4, 0.75)


def test_synchronizations_of_the_same_number_are_compared() -> None:
    """D falls with the number of the synchronization and is proportional to P at each.

    One of both series is longer.
    """
    course = [1 / number for number in range(1, 21)]
    double = [2 * D for D in course]
    for short, long in ((course[:8], double), (course, double[:8])):
        step = growth(2, [short, course], 4, [long, double])
        assert (step.low, step.rho, step.high) == (1, 1, 1)


def test_the_last_synchronizations_that_both_have_are_compared() -> None:
    step = growth(2, [[9, 9, 1, 1, 1, 1]], 4, [[9, 9, 3, 3, 3, 3, 7, 7, 7, 7]])
    assert (step.low, step.rho, step.high) == (1.5, 1.5, 1.5)


def test_seeds_show_how_sure_it_is() -> None:
    step = growth(2, [[1.0] * 5, [1.0] * 5], 4, [[1.6] * 5, [2.0] * 5])
    assert step.rho == pytest.approx(0.9)
    assert (step.low, step.high) == (pytest.approx(0.8), pytest.approx(1.0))
    assert not step.clear(THRESHOLD)
    assert verdict(2, [step]) == Verdict(2, 4, final=True)


def test_as_long_as_it_grows_the_answer_is_open() -> None:
    assert verdict(2, growths_of(series(1, 2, 4))) == Verdict(8, None, final=False)


def test_it_stops_at_the_first_that_does_not_grow() -> None:
    assert verdict(2, growths_of(series(1, 1, 5))) == Verdict(2, None, final=True)


@pytest.mark.parametrize(
    ("distances", "flat"),
    [
        ([1] * 3, False),
        ([1] * 4, True),
        ([1, 1, 1.2, 1.2], False),
        ([5, 5, 1, 1, 1.05, 1.05], True),
    ],
)
def test_flat(distances: list[float], flat: bool) -> None:
    assert is_flat(distances) is flat


def test_independent_walkers() -> None:
    """At a fixed rate they have 1 : 1.22 : 1.32 : 1.37 for P = 2, 4, 8, 16, for any model."""
    assert [ideal(2, P, "none") * P / 2 for P in (4, 8, 16)] == pytest.approx([1.22, 1.32, 1.37], abs=0.005)
    assert ideal(2, 4, "linear") == pytest.approx(math.sqrt(1.5))
    assert ideal(2, 4, "root") == pytest.approx(math.sqrt(1.5) / math.sqrt(2))


@pytest.mark.parametrize(
    ("low", "high", "clear"),
    [(0.91, 1.0, True), (0.7, 0.83, True), (0.86, 1.0, False), (0.88, 0.88, False), (0.86, 0.86, False)],
)
def test_clear(low: float, high: float, clear: bool) -> None:
    """Growth is clear if the interval is on one side of the threshold and not near it."""
    assert Growth(2, 4, (low + high) / 2, low, high).clear(0.87) is clear
