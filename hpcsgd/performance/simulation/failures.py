"""Simulate failing nodes: the time that checkpoints cost and save, and the best checkpoint interval.

A job that dies with a node restarts `restart_seconds` later from its last checkpoint. C is the cost of a
checkpoint, M the mean time between failures of the job.

References: J. W. Young, CACM 1974: a checkpoint every √(2·C·M) seconds. J. T. Daly, Future Generation
Computer Systems 2006: eq. 37 for the interval, eq. 20 for the time that a job takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from hpcsgd.errors import UserError
from hpcsgd.performance.simulation.compute import Seconds

TRIED = 2.0 ** np.linspace(-2.5, 2.5, 81)
"""Intervals to try, as multiples of Young's interval."""
LONGEST = 5.0
"""The longest work or restart to simulate, in units of M. Of longer ones, under 1 in 150 would succeed."""
FAILURES_SEEN = 40_000
"""Failures to simulate in all repetitions together, so that the mean lost time is exact to 0.5 %."""
REPETITIONS = (64, 4096)
MOST = 100_000
"""The largest number of failures of a job; to simulate them takes a minute."""
HOUR = 3600.0


@dataclass(frozen=True)
class Failures:
    """Failures of nodes and of single ranks, with exponential times between them."""

    mtbf_seconds: float
    """Mean time between failures of a node."""
    checkpoint_seconds: float
    restart_seconds: float = 0.0
    work_seconds: float = 86_400.0
    """Duration of the job without failures and checkpoints."""
    interval_seconds: float | None = None
    """Seconds of work between checkpoints; None: the best interval that the simulation finds."""
    rank_mtbf_seconds: float | None = None
    """Mean time between failures of a rank's process; None: it fails only with its node."""
    heartbeat_timeout_seconds: float = 10.0
    """Seconds that living groups wait for a silent group, if groups die one by one."""

    def __post_init__(self) -> None:
        positive = (
            "mtbf_seconds",
            "checkpoint_seconds",
            "work_seconds",
            "interval_seconds",
            "rank_mtbf_seconds",
        )
        for name in positive:
            if (value := getattr(self, name)) is not None and value <= 0:
                raise UserError(f"{name} = {value}: expected a number above 0")
        for name in ("restart_seconds", "heartbeat_timeout_seconds"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} = {getattr(self, name)}: expected 0 or more")

    def mtbf(self, nodes: int, ranks: int) -> float:
        """Return the mean seconds between failures of a set of nodes and ranks; infinite if none can fail."""
        rate = nodes / self.mtbf_seconds
        if self.rank_mtbf_seconds is not None:
            rate += ranks / self.rank_mtbf_seconds
        return 1 / rate if rate else math.inf


@dataclass(frozen=True)
class Overhead:
    """The seconds of a job by cause: an array entry per checkpoint interval, means over repetitions."""

    work: Seconds
    checkpoints: Seconds
    restarts: Seconds
    lost: Seconds
    failures: Seconds
    """The number of failures."""

    @property
    def total(self) -> Seconds:
        return self.work + self.checkpoints + self.restarts + self.lost


@dataclass(frozen=True)
class Checkpointing:
    """A job's goodput with its checkpoint interval, and the interval with the best goodput.

    The goodput is the share of the job's time that is spent on work and not lost to failures. `tried_goodput`
    has the goodput of each interval in `tried_seconds`.
    """

    mtbf_seconds: float
    """Mean time between failures of the job."""
    interval_seconds: float
    goodput: float
    seconds: dict[str, float]
    failures: float
    best_seconds: float
    best_goodput: float
    young_seconds: float
    daly_seconds: float
    tried_seconds: list[float]
    tried_goodput: list[float]


def checkpointing(failures: Failures, hosts: int, seed: int, ranks: int = 0) -> Checkpointing:
    """Simulate a job on `hosts` nodes, with several checkpoint intervals and the same failures for each.

    The processes of its `ranks` ranks may fail, too.
    """
    M, C = failures.mtbf(hosts, ranks), failures.checkpoint_seconds
    tried = young(C, M) * TRIED
    tried = tried[tried + C <= LONGEST * M]
    if failures.restart_seconds > LONGEST * M:
        restart = failures.restart_seconds
        raise UserError(
            f"[failures] restart_seconds = {restart:g}: something fails every {M:.4g} s, and a restart "
            f"hardly ever fits between; allowed are {LONGEST * M:.4g} seconds",
            key=("failures", "restart_seconds"),
            value=restart,
        )
    if len(tried) < 3:
        raise UserError(
            f"[failures] checkpoint_seconds = {C:g}: something fails every {M:.4g} s, and work with a "
            "checkpoint hardly ever fits between",
            key=("failures", "checkpoint_seconds"),
            value=C,
        )
    if (interval := failures.interval_seconds) is not None and interval + C > LONGEST * M:
        raise UserError(
            f"[failures] checkpoint_every_seconds = {interval:g}: something fails every {M:.4g} s, and so "
            f"much work hardly ever fits between; allowed are {LONGEST * M - C:.4g} seconds",
            key=("failures", "checkpoint_every_seconds"),
            value=interval,
        )
    toll = jobs(failures, M, tried, _repetitions(failures, M), Generator(np.random.SFC64([seed, 2])))
    goodput = failures.work_seconds / toll.total
    best = _peak(tried, goodput)
    chosen = np.array([failures.interval_seconds or best, best])
    toll = jobs(failures, M, chosen, _repetitions(failures, M), Generator(np.random.SFC64([seed, 2])))
    parts = {name: float(getattr(toll, name)[0]) for name in ("work", "checkpoints", "restarts", "lost")}
    return Checkpointing(
        mtbf_seconds=M,
        interval_seconds=float(chosen[0]),
        goodput=float(failures.work_seconds / toll.total[0]),
        seconds=parts,
        failures=float(toll.failures[0]),
        best_seconds=best,
        best_goodput=float(failures.work_seconds / toll.total[1]),
        young_seconds=young(C, M),
        daly_seconds=daly(C, M),
        tried_seconds=tried.tolist(),
        tried_goodput=goodput.tolist(),
    )


def require_few(failures: Failures, hosts: int, ranks: int) -> None:
    """Raise `UserError` if there are more failures than can be simulated one by one."""
    M = failures.mtbf(hosts, ranks)
    if failures.work_seconds / M > MOST:
        raise UserError(
            f"[failures] work_hours = {failures.work_seconds / HOUR:g}: something fails every {M:.4g} s, "
            f"more than {MOST:,} times in all; allowed are {MOST * M / HOUR:.4g} hours",
            key=("failures", "work_hours"),
        )
    W, C, interval = failures.work_seconds, failures.checkpoint_seconds, failures.interval_seconds
    if interval is not None and W * (1 + C / interval) / M > MOST:
        least = W * C / max(MOST * M - W, M)
        raise UserError(
            f"[failures] checkpoint_every_seconds = {interval:g}: with so many checkpoints something fails "
            f"more than {MOST:,} times in all; allowed are {least:.4g} seconds or more",
            key=("failures", "checkpoint_every_seconds"),
            value=interval,
        )


def young(C: float, M: float) -> float:
    """Return Young's interval √(2·C·M), in seconds of work; C and M are as in this file's docstring."""
    return math.sqrt(2 * C * M)


def daly(C: float, M: float) -> float:
    """Return Daly's higher-order interval √(2CM)·(1 + ⅓·√(C/2M) + ⅑·C/2M) − C, or M if C ≥ 2M."""
    if C >= 2 * M:
        return M
    x = C / (2 * M)
    return young(C, M) * (1 + math.sqrt(x) / 3 + x / 9) - C


def mean_goodput(failures: Failures, M: float, interval: float) -> float:
    """Return a long job's goodput by Daly's eq. 20, if its mean time between failures is M seconds.

    On average, the work of an interval takes M·e^(R/M)·(e^((interval + C)/M) − 1) seconds, where C is the
    cost of a checkpoint and R that of a restart.
    """
    C, R = failures.checkpoint_seconds, failures.restart_seconds
    with np.errstate(over="ignore"):
        return float(interval / (M * np.exp(R / M) * np.expm1((interval + C) / M)))


def jobs(failures: Failures, M: float, intervals: Seconds, repetitions: int, rng: Generator) -> Overhead:
    """Simulate `repetitions` jobs for each of `intervals`, all at once, from one failure to the next.

    A repetition has the same failures for every interval. There is no checkpoint at the end of the job. After
    a failure during a restart the job restarts again.
    """
    W, C, R = failures.work_seconds, failures.checkpoint_seconds, failures.restart_seconds
    pieces = np.ceil(W / intervals)[:, None]
    piece = intervals[:, None] + C
    last = W - (pieces - 1) * intervals[:, None]
    shape = (len(intervals), repetitions)
    saved, restarts, lost, count = (np.zeros(shape) for _ in range(4))
    """Per job: pieces of work (saved), seconds of restarts and of lost work, number of failures."""
    going = np.ones(shape, bool)
    start = 0.0
    while going.any():
        gap = rng.exponential(M, repetitions)
        up = np.maximum(gap - start, 0.0)  # the part of the gap after the restart
        going &= (pieces - 1 - saved) * piece + last > up
        done = np.minimum(np.floor(up / piece), pieces - 1 - saved)
        lost += np.where(going, up - done * piece, 0.0)
        saved += np.where(going, done, 0.0)
        restarts += np.where(going, np.minimum(gap, start), 0.0)
        count += going
        start = R
    restarts += R * (count > 0)  # the last restart, which no failure interrupted
    return Overhead(
        work=np.full(len(intervals), W),
        checkpoints=((pieces - 1) * C).mean(axis=1),
        restarts=restarts.mean(axis=1),
        lost=lost.mean(axis=1),
        failures=count.mean(axis=1),
    )


def _repetitions(failures: Failures, M: float) -> int:
    low, high = REPETITIONS
    return int(np.clip(FAILURES_SEEN * M / failures.work_seconds, low, high))


def _peak(intervals: NDArray[np.float64], goodput: NDArray[np.float64]) -> float:
    """Return the interval at which a parabola, fitted to the goodput near the best interval, has its peak.

    The parabola is a function of the interval's logarithm. The fit averages out the randomness of single
    values.
    """
    x = np.log(intervals)
    near = np.abs(x - x[goodput.argmax()]) <= math.log(2.0)
    a, b, _ = np.polyfit(x[near], goodput[near], 2)
    return float(
        np.exp(np.clip(-b / (2 * a), x[near][0], x[near][-1])) if a < 0 else intervals[goodput.argmax()]
    )
