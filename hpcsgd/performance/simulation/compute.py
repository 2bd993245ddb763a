"""Draw the random seconds for which ranks compute in a step: distributions and stragglers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from hpcsgd.errors import UserError, count_text, in_section
from hpcsgd.performance.simulation.durations import Layout

Seconds = NDArray[np.float64]


@runtime_checkable
class Distribution(Protocol):
    """A distribution of the seconds that a rank computes in a step."""

    def sample(self, rng: Generator, n: int) -> Seconds:
        """Return the seconds of `n` independent ranks, drawn from `rng`."""
        ...


@runtime_checkable
class Stragglers(Protocol):
    """A rule that makes some ranks (stragglers) slower than the others."""

    def factors(self, steady: Generator, anew: Generator, n: int) -> Seconds:
        """Return a factor for each of `n` ranks, by which its seconds are multiplied.

        `steady` draws the same numbers in every step, `anew` draws new ones.
        """
        ...


@dataclass(frozen=True)
class Constant:
    """The distribution of a constant: `mean_seconds` for every rank and step."""

    mean_seconds: float

    def __post_init__(self) -> None:
        _require_positive("mean_seconds", self.mean_seconds)

    def sample(self, rng: Generator, n: int) -> Seconds:
        return np.full(n, float(self.mean_seconds))


@dataclass(frozen=True)
class LogNormal:
    """The log-normal distribution. `sigma` is the standard deviation as a share of the mean."""

    mean_seconds: float
    sigma: float

    def __post_init__(self) -> None:
        _require_positive("mean_seconds", self.mean_seconds)
        if self.sigma < 0:
            raise UserError(
                f"sigma = {self.sigma}: a standard deviation is 0 or more, a part of the mean",
                key="sigma",
                value=self.sigma,
            )

    def sample(self, rng: Generator, n: int) -> Seconds:
        variance = math.log1p(self.sigma**2)
        seconds = rng.standard_normal(n)
        seconds *= math.sqrt(variance)
        seconds += math.log(self.mean_seconds) - variance / 2
        return np.exp(seconds, out=seconds)


@dataclass(frozen=True)
class Measured:
    """The distribution of measured seconds, all of which are equally likely."""

    seconds: Sequence[float]

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, list | tuple) or not self.seconds:
            raise UserError(
                f"seconds = {self.seconds!r}: expected a list of seconds", key="seconds", value=self.seconds
            )
        for place, value in enumerate(self.seconds):
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise UserError(f"seconds[{place}] = {value!r}: expected a number above 0", key="seconds")

    def sample(self, rng: Generator, n: int) -> Seconds:
        return np.asarray(self.seconds, float)[rng.integers(len(self.seconds), size=n)]


@dataclass(frozen=True)
class Lasting:
    """Stragglers that are the same ranks in every step: given ranks, or a random fraction of all."""

    factor: float
    ranks: Sequence[int] = ()
    fraction: float = 0.0

    def __post_init__(self) -> None:
        _require_positive("factor", self.factor)
        _require_fraction(self.fraction)
        if bool(self.ranks) == (self.fraction > 0):
            raise UserError("lasting stragglers: give their ranks, or the fraction of all that they are")
        if any(type(rank) is not int or rank < 0 for rank in self.ranks):
            raise UserError(
                f"ranks = {self.ranks!r}: expected a list of ranks, counted from 0",
                key="ranks",
                value=self.ranks,
            )

    def factors(self, steady: Generator, anew: Generator, n: int) -> Seconds:
        slow = list(self.ranks) or steady.permutation(n)[: round(self.fraction * n)]
        if max(self.ranks, default=0) >= n:
            raise UserError(
                f"ranks = {self.ranks!r}: there are {count_text(n, 'rank')}, the last is {n - 1}",
                key="ranks",
                value=self.ranks,
            )
        factors = np.ones(n)
        factors[slow] = self.factor
        return factors


@dataclass(frozen=True)
class Wandering:
    """Stragglers that change in every step: each rank is slow with probability `fraction`."""

    factor: float
    fraction: float

    def __post_init__(self) -> None:
        _require_positive("factor", self.factor)
        _require_fraction(self.fraction)

    def factors(self, steady: Generator, anew: Generator, n: int) -> Seconds:
        return np.where(anew.random(n) < self.fraction, self.factor, 1.0)


DISTRIBUTIONS: Mapping[str, Callable[..., Distribution]] = {
    "constant": Constant,
    "lognormal": LogNormal,
    "measured": Measured,
}
"""Distributions by their names in scenario files."""
STRAGGLERS: Mapping[str, Callable[..., Stragglers]] = {"lasting": Lasting, "wandering": Wandering}


@dataclass(frozen=True)
class Compute:
    """The compute seconds of all ranks. They depend only on the seed and the step."""

    layout: Layout
    distribution: Distribution
    stragglers: Stragglers | None = None
    seed: int = 1

    def seconds(self, t: int) -> Seconds:
        """Return the seconds of all ranks in step `t`, counted from 0, as (P, K)."""
        N = self.layout.N
        anew = _generator(self.seed, 1, t)
        seconds = self.distribution.sample(anew, N)
        if self.stragglers is not None:
            with in_section("stragglers"):
                seconds *= self.stragglers.factors(_generator(self.seed, 0), anew, N)
        return seconds.reshape(self.layout.P, self.layout.K)


def _generator(*key: int) -> Generator:
    return Generator(np.random.SFC64(key))


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise UserError(f"{name} = {value}: expected a number above 0", key=name, value=value)


def _require_fraction(value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"fraction = {value}: a part of all ranks, from 0 to 1", key="fraction", value=value)
