"""Checkpoints compared with the formulas of Young and Daly, and with a job simulated failure by failure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hpcsgd.core.waits import All
from hpcsgd.errors import UserError
from hpcsgd.performance.simulation import Constant, Durations, Failures, Layout, Simulation, simulate
from hpcsgd.performance.simulation.failures import checkpointing, daly, jobs, mean_goodput, require_few, young

HOUR = 3600.0


def expected(W: float, interval: float, C: float, R: float, M: float) -> float:
    """Return Daly's eq. 20, M·e^(R/M)·(e^(L/M) − 1) per piece of work; the last has no checkpoint."""
    pieces = math.ceil(W / interval)
    lengths = [interval + C] * (pieces - 1) + [W - (pieces - 1) * interval]
    return sum(M * math.exp(R / M) * math.expm1(length / M) for length in lengths)


def told(W: float, interval: float, C: float, R: float, gaps: list[float]) -> dict[str, float]:
    """Simulate one job, failure by failure, and return the seconds spent by kind."""
    spent = {"work": 0.0, "checkpoints": 0.0, "restarts": 0.0, "lost": 0.0, "failures": 0.0}
    left, first = W, True
    for gap in gaps:
        start = 0.0 if first else R
        first = False
        if gap < start:
            spent["restarts"] += gap
            spent["failures"] += 1
            continue
        spent["restarts"] += start
        up = gap - start
        while True:
            piece = min(interval, left)
            cost = C if left > interval else 0.0
            if piece + cost > up:
                spent["lost"] += up
                spent["failures"] += 1
                break
            up -= piece + cost
            spent["work"] += piece
            spent["checkpoints"] += cost
            left -= piece
            if left <= 1e-9:
                return spent
    raise AssertionError("not enough gaps")


class Given:
    """A replacement of a random generator that returns given gaps."""

    def __init__(self, gaps: np.ndarray) -> None:
        self.gaps = iter(gaps)

    def exponential(self, mean: float, n: int) -> np.ndarray:
        return next(self.gaps)


@pytest.mark.parametrize("R", [0.0, 3.0, 20.0])
def test_the_same_as_failure_by_failure(R: float) -> None:
    rng = np.random.default_rng(4)
    gaps = rng.exponential(30.0, (400, 6))
    intervals = np.array([4.0, 7.5, 13.0, 200.0])
    failures = Failures(mtbf_seconds=1.0, checkpoint_seconds=1.5, restart_seconds=R, work_seconds=61.0)
    toll = jobs(failures, 30.0, intervals, 6, Given(gaps))  # pyright: ignore[reportArgumentType]
    for i, interval in enumerate(intervals):
        each = [told(61.0, interval, 1.5, R, gaps[:, r].tolist()) for r in range(6)]
        for name in each[0]:
            assert getattr(toll, name)[i] == pytest.approx(np.mean([one[name] for one in each]), rel=1e-9), (
                name
            )


@pytest.mark.parametrize(("C", "R", "M"), [(30.0, 120.0, 4 * HOUR), (120.0, 600.0, HOUR), (5.0, 0.0, 500.0)])
def test_the_mean_is_dalys(C: float, R: float, M: float) -> None:
    failures = Failures(mtbf_seconds=M, checkpoint_seconds=C, restart_seconds=R, work_seconds=40 * M)
    intervals = young(C, M) * np.array([0.4, 1.0, 2.0])
    toll = jobs(failures, M, intervals, 2000, np.random.Generator(np.random.SFC64(1)))
    exact = [expected(40 * M, interval, C, R, M) for interval in intervals]
    np.testing.assert_allclose(toll.total, exact, rtol=0.01)
    np.testing.assert_allclose(toll.failures, toll.total / M, rtol=0.02)


@pytest.mark.parametrize(("C", "M"), [(10.0, 6 * HOUR), (60.0, 2 * HOUR), (300.0, HOUR)])
def test_the_best_interval_is_dalys_and_near_youngs(C: float, M: float) -> None:
    failures = Failures(mtbf_seconds=M, checkpoint_seconds=C, restart_seconds=2 * C, work_seconds=60 * M)
    found = checkpointing(failures, hosts=1, seed=3)
    exact = min(np.linspace(0.3, 2.0, 400) * young(C, M), key=lambda x: expected(60 * M, x, C, 2 * C, M))
    assert daly(C, M) == pytest.approx(exact, rel=0.02)
    assert found.best_seconds == pytest.approx(daly(C, M), rel=0.1)
    best_there_is = 60 * M / expected(60 * M, exact, C, 2 * C, M)
    assert found.best_goodput == pytest.approx(best_there_is, rel=0.005)
    assert found.young_seconds == pytest.approx(math.sqrt(2 * C * M))


def test_more_nodes_fail_more_often() -> None:
    failures = Failures(mtbf_seconds=1000 * HOUR, checkpoint_seconds=20.0, restart_seconds=60.0)
    few, many = (checkpointing(failures, hosts, seed=1) for hosts in (10, 400))
    assert many.mtbf_seconds == pytest.approx(few.mtbf_seconds / 40)
    assert many.best_seconds < few.best_seconds
    assert many.goodput < few.goodput < 1


def test_a_job_dies_with_each_of_its_ranks_too() -> None:
    failures = Failures(1000.0, checkpoint_seconds=0.1, rank_mtbf_seconds=400.0, work_seconds=5000.0)
    assert failures.mtbf(nodes=2, ranks=8) == pytest.approx(1 / (2 / 1000 + 8 / 400))
    assert failures.mtbf(nodes=0, ranks=4) == pytest.approx(100.0)
    assert Failures(1000.0, checkpoint_seconds=0.1).mtbf(nodes=0, ranks=4) == math.inf
    job = Simulation(
        layout=Layout(4, 2, 4),
        compute=Constant(0.1),
        durations=Durations(),
        waits=All(period=1),
        steps=10,
        failures=failures,
    )
    told = simulate(job).checkpointing
    assert told is not None
    assert told.mtbf_seconds == pytest.approx(failures.mtbf(nodes=2, ranks=8))


def test_an_interval_that_is_given_is_kept_and_costs() -> None:
    given = Failures(1e7, checkpoint_seconds=20.0, restart_seconds=60.0, interval_seconds=200.0)
    found = checkpointing(given, hosts=1000, seed=1)
    assert found.interval_seconds == 200.0
    assert found.goodput < found.best_goodput
    assert sum(found.seconds.values()) == pytest.approx(given.work_seconds / found.goodput)


def test_a_job_that_never_ends_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^\[failures\] checkpoint_seconds = 30: something fails every 2 s, and work with"
    ):
        checkpointing(Failures(2000.0, checkpoint_seconds=30.0), hosts=1000, seed=1)


def test_a_job_that_never_starts_is_refused() -> None:
    failures = Failures(10.0, checkpoint_seconds=0.1, restart_seconds=60.0)
    with pytest.raises(
        UserError,
        match=r"^\[failures\] restart_seconds = 60: something fails every 10 s, and a restart hardly",
    ):
        checkpointing(failures, hosts=1, seed=1)


def test_the_mean_goodput_is_that_of_long_jobs() -> None:
    failures = Failures(HOUR, checkpoint_seconds=120.0, restart_seconds=600.0, work_seconds=200 * HOUR)
    found = checkpointing(failures, hosts=1, seed=1)
    assert mean_goodput(failures, HOUR, found.best_seconds) == pytest.approx(found.best_goodput, rel=0.01)
    assert mean_goodput(failures, 0.5, 1.0) == 0.0


def test_goodput_takes_its_part_of_the_samples() -> None:
    job = {
        "layout": Layout(4, 2),
        "compute": Constant(0.1),
        "durations": Durations(),
        "waits": All(period=1),
        "steps": 10,
    }
    calm = simulate(Simulation(**job))
    rough = simulate(Simulation(**job, failures=Failures(8 * HOUR, 20.0, 60.0)))
    assert calm.goodput == 1
    assert calm.checkpointing is None
    assert rough.samples_per_second == pytest.approx(calm.samples_per_second * rough.goodput)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"failures": Failures(HOUR, 1.0, work_seconds=1e12 * HOUR)},
            r"work_hours = 1e\+12: something fails .*; allowed are 2.5e\+04 hours",
        ),
        ({"steps": 10**10}, "steps = 10000000000 of 4 ranks: .*; allowed are 2500000000 steps"),
    ],
)
def test_what_would_never_end_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Simulation(
            layout=Layout(4, 1), compute=Constant(0.1), durations=Durations(), waits=All(period=1),
            **{"steps": 1, **given},
        )  # fmt: skip


def test_checkpoints_that_take_forever_are_refused() -> None:
    """Most of a job's time may be for checkpoints, in which it fails, too."""
    failures = Failures(mtbf_seconds=10 * HOUR, checkpoint_seconds=10.0, interval_seconds=1e-9)
    with pytest.raises(UserError, match=r"every_seconds = 1e-09: .* 100,000 times in all; allowed are 0.000"):
        require_few(failures, 4, 4)
    require_few(replace(failures, interval_seconds=1.0), 4, 4)
