"""The distributions from which seconds are drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hpcsgd.core.waits import All
from hpcsgd.errors import UserError
from hpcsgd.performance.simulation import (
    Constant,
    Durations,
    Failures,
    Lasting,
    Layout,
    LogNormal,
    Measured,
    Message,
    Wandering,
)
from hpcsgd.performance.simulation.compute import Compute, Distribution, Stragglers
from hpcsgd.performance.simulation.rules import Synchronous, rule_of
from hpcsgd.performance.simulation.simulated_run import SimulatedRun


def drawn(
    distribution: Distribution, stragglers: Stragglers | None = None, N: int = 1000, T: int = 50
) -> np.ndarray:
    compute = Compute(Layout(N, 1), distribution, stragglers)
    return np.stack([compute.seconds(t).ravel() for t in range(T)])


def expected_max(mean: float, sigma: float, n: int) -> float:
    """Return the expected maximum of n lognormals, by ∫ 1 − F(x)^n dx over x ≥ 0."""
    s = math.sqrt(math.log1p(sigma**2))
    mu = math.log(mean) - s**2 / 2
    z = np.linspace(-10.0, 12.0, 400_001)
    F = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in z])
    x = np.exp(mu + s * z)
    return float(x[0] + np.trapezoid(-np.expm1(n * np.log(np.maximum(F, 1e-300))), x))


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "P", "K"), [(0.1, 64, 1), (0.1, 8, 8), (0.5, 16, 1), (0.5, 4, 32)])
def test_a_synchronous_step_is_the_expected_maximum(sigma: float, P: int, K: int) -> None:
    """The maximum is over all ranks for any grouping; if groups never synchronize, over those of a group."""
    T = 4000
    compute = Compute(Layout(P, K), LogNormal(0.1, sigma))
    together, alone = SimulatedRun(compute, Durations(), T), SimulatedRun(compute, Durations(), T)
    Synchronous(1).run(together)
    Synchronous(T + 1).run(alone)
    assert together.ended.max() / T == pytest.approx(expected_max(0.1, sigma, P * K), rel=0.01)
    assert alone.ended.mean() / T == pytest.approx(expected_max(0.1, sigma, K), rel=0.01)
    in_the_group = alone.stats.totals()["in the group"] / (P * T)
    assert in_the_group == pytest.approx(expected_max(0.1, sigma, K) - 0.1, abs=0.001)


def test_the_mean_and_the_deviation_are_those_given() -> None:
    seconds = drawn(LogNormal(0.2, 0.3))
    assert seconds.mean() == pytest.approx(0.2, rel=0.01)
    assert seconds.std() == pytest.approx(0.06, rel=0.03)
    assert drawn(LogNormal(0.2, 0.0)) == pytest.approx(0.2)
    assert (drawn(Constant(0.2)) == 0.2).all()


def test_what_was_measured_comes_again_evenly() -> None:
    values, counts = np.unique(drawn(Measured([0.1, 0.2, 0.4])), return_counts=True)
    assert values.tolist() == [0.1, 0.2, 0.4]
    np.testing.assert_allclose(counts / counts.sum(), 1 / 3, atol=0.01)


def test_lasting_stragglers_stay() -> None:
    slow = drawn(Constant(0.1), Lasting(3.0, fraction=0.05)) > 0.2
    assert (slow.sum(axis=1) == 50).all()
    assert (slow == slow[0]).all()
    assert np.flatnonzero(drawn(Constant(0.1), Lasting(3.0, ranks=[7, 11]))[0] > 0.2).tolist() == [7, 11]


def test_wandering_stragglers_do_not() -> None:
    slow = drawn(Constant(0.1), Wandering(3.0, 0.05)) > 0.2
    assert slow.mean() == pytest.approx(0.05, abs=0.005)
    assert (slow.mean(axis=0) < 0.5).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Constant(0.0), "mean_seconds = 0.0: expected a number above 0"),
        (lambda: LogNormal(0.1, -0.1), "sigma = -0.1: a standard deviation is 0 or more"),
        (lambda: Measured([]), r"seconds = \[\]: expected a list of seconds"),
        (lambda: Measured([0.1, 0.0]), r"seconds\[1\] = 0.0: expected a number above 0"),
        (lambda: Lasting(2.0), "give their ranks, or the fraction of all"),
        (lambda: Lasting(2.0, ranks=[1], fraction=0.5), "give their ranks, or the fraction of all"),
        (lambda: drawn(Constant(0.1), Lasting(2.0, ranks=[1000])), "there are 1,000 ranks, the last is"),
        (lambda: Wandering(0.0, 0.5), "factor = 0.0: expected a number above 0"),
        (lambda: Wandering(2.0, 1.5), "fraction = 1.5: a part of all ranks, from 0 to 1"),
        (lambda: Layout(0, 1), "groups = 0: expected 1 or more"),
        (lambda: Message(latency=-1e-6), "latency = -1e-06: expected seconds, 0 or more"),
        (lambda: Durations(gather=float("nan")), "gather = nan: expected seconds, 0 or more"),
        (lambda: Failures(1.0, 1.0, -1.0), "restart_seconds = -1.0: expected 0 or more"),
        (lambda: Failures(1.0, 0.0), "checkpoint_seconds = 0.0: expected a number above 0"),
        (
            lambda: Failures(1.0, 1.0, heartbeat_timeout_seconds=-1.0),
            "heartbeat_timeout_seconds = -1.0: expected 0 or more",
        ),
        (lambda: rule_of(All(period=0)), "period = 0: groups synchronize after 1 step or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong, message: str) -> None:
    with pytest.raises(UserError, match=message):
        wrong()
