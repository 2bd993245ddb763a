"""Random numbers that are equal on all ranks without messages, in every process and version of NumPy."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """Purposes of random numbers; each has its own sequence."""

    SHARES = 1
    PASS = 2
    PROPORTIONS = 3
    SHARERS = 4
    OTHERS = 5
    PIECES = 6


POOL = 256
"""Number of runs of neighbouring samples among which samples are mixed."""


def epoch_order(n: int, seed: int, epoch: int, run: int = 1) -> NDArray[np.int64]:
    """Return the order of n samples in an epoch; runs of `run` neighbours are shuffled as in `_order`."""
    return _order(n, np.random.SeedSequence([seed, epoch]), run)


def shuffled(
    rows: NDArray[np.int64], seed: int, purpose: Purpose, *of: int, run: int = 1
) -> NDArray[np.int64]:
    """Return `rows` in a random order that follows from `seed`, `purpose` and further numbers `of`."""
    return rows[_order(len(rows), np.random.SeedSequence(seed, spawn_key=(purpose, *of)), run)]


def dirichlet(alpha: float, shape: tuple[int, int], seed: int) -> NDArray[np.float64]:
    """Return proportions [rows, P]: each row is drawn from Dir(alpha, …, alpha) and sums to 1."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(Purpose.PROPORTIONS,)))
    frozen = np.random.RandomState(bits)  # NumPy promises that its numbers never change (NEP 19)
    # Gamma(alpha) = Gamma(alpha + 1) · U^(1/alpha), as logarithms: with a small alpha all would underflow to
    # 0.
    logs = np.log(frozen.standard_gamma(alpha + 1, shape)) + np.log1p(-frozen.random_sample(shape)) / alpha
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def uniform(count: int, seed: int, purpose: Purpose, *of: int) -> NDArray[np.float64]:
    """Return `count` random numbers in [0, 1) that follow from `seed`, `purpose` and further numbers `of`."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose, *of)))
    return np.ldexp((bits.random_raw(count) >> np.uint64(11)).astype(np.float64), -53)


def distinct(count: int, below: int, without: set[int], *of: int) -> list[int]:
    """Return `count` different random integers in [0, `below`), none in `without`, that follow from `of`."""
    assert below - len(without) >= count
    bits = np.random.PCG64(np.random.SeedSequence(0, spawn_key=(Purpose.OTHERS, *of)))
    found: dict[int, None] = {}
    while len(found) < count:
        drawn = (bits.random_raw(2 * count) % np.uint64(below)).tolist()
        found.update(dict.fromkeys(number for number in drawn if number not in without))
    return list(found)[:count]


def _order(n: int, seeds: np.random.SeedSequence, run: int = 1) -> NDArray[np.int64]:
    """Return the numbers 0 … n − 1 in a random order.

    With more than `POOL` runs of `run` > 1 neighbours, the runs are shuffled. Then each sample moves back by
    less than a pool (`POOL` runs); the last ones move to the beginning. So the runs are read one after the
    other, and a batch has samples of a whole pool.
    """
    # Sorted raw draws are the same in every version of NumPy, unlike Generator.permutation.
    bits, pool = np.random.PCG64(seeds), run * POOL
    if run == 1 or n <= pool:
        return np.argsort(bits.random_raw(n), kind="stable")
    runs = np.argsort(bits.random_raw(-(-n // run)), kind="stable")
    rows = (runs[:, None] * run + np.arange(run)).ravel()
    places = (np.arange(n, dtype=np.uint64) + bits.random_raw(n) % np.uint64(pool)) % np.uint64(n)
    return rows[rows < n][np.argsort(places, kind="stable")]
