"""Random numbers that are equal on all ranks without messages, in every process and version of NumPy."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """The purposes of random numbers; each has its own sequence."""

    SHARES = 1
    """Which samples a group owns (`hpcsgd.data.partition`)."""
    PASS = 2
    """The order of a group's samples in a pass."""
    PROPORTIONS = 3
    """The proportions of labels in `Dirichlet`."""
    SHARERS = 4
    """The groups that share samples in `Injection`."""
    OTHERS = 5
    """The unrated items in test samples of ratings."""
    PIECES = 6
    """The random parts of samples, such as patches of images."""


POOL = 256
"""Number of runs of neighbouring samples among which samples are mixed; see `_order`."""


def epoch_order(n: int, seed: int, epoch: int, run: int = 1) -> NDArray[np.int64]:
    """Return the indices of n samples in the random order of an epoch, which keeps runs as `_order` does."""
    return _order(n, np.random.SeedSequence([seed, epoch]), run)


def shuffled(
    rows: NDArray[np.int64], seed: int, purpose: Purpose, *of: int, run: int = 1
) -> NDArray[np.int64]:
    """Return `rows` in a random order that `seed`, `purpose` and further numbers `of` determine.

    The order keeps runs of `run` neighbours as `_order` does.
    """
    return rows[_order(len(rows), np.random.SeedSequence(seed, spawn_key=(purpose, *of)), run)]


def dirichlet(alpha: float, shape: tuple[int, int], seed: int) -> NDArray[np.float64]:
    """Return random proportions of `shape` (rows, P): each row is drawn from Dir(alpha, …, alpha)."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(Purpose.PROPORTIONS,)))
    frozen = np.random.RandomState(bits)  # NumPy promises that its numbers never change (NEP 19)
    # Gamma(alpha) = Gamma(alpha + 1) · U^(1/alpha). Computed as logarithms, because with a small alpha all
    # values would underflow to 0.
    logs = np.log(frozen.standard_gamma(alpha + 1, shape)) + np.log1p(-frozen.random_sample(shape)) / alpha
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def uniform(count: int, seed: int, purpose: Purpose, *of: int) -> NDArray[np.float64]:
    """Return `count` random numbers in [0, 1) that `seed`, `purpose` and further numbers `of` determine."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose, *of)))
    return np.ldexp((bits.random_raw(count) >> np.uint64(11)).astype(np.float64), -53)


def distinct(count: int, below: int, without: set[int], *of: int) -> list[int]:
    """Return `count` different random integers in [0, `below`), except those in `without`.

    The numbers `of` determine the result.
    """
    assert below - len(without) >= count
    bits = np.random.PCG64(np.random.SeedSequence(0, spawn_key=(Purpose.OTHERS, *of)))
    found: dict[int, None] = {}
    while len(found) < count:
        drawn = (bits.random_raw(2 * count) % np.uint64(below)).tolist()
        found.update(dict.fromkeys(number for number in drawn if number not in without))
    return list(found)[:count]


def _order(n: int, seeds: np.random.SeedSequence, run: int = 1) -> NDArray[np.int64]:
    """Return the numbers 0 … n − 1 in a random order.

    If there are more than `POOL` runs of `run` > 1 neighbouring samples, the runs are shuffled. Then each
    sample is moved back by a random distance of less than `POOL` runs; samples at the end are moved to the
    beginning. So the runs are read about one after the other, and a batch has samples of `POOL` runs.
    """
    # Sorted raw draws are the same in every version of NumPy, unlike Generator.permutation.
    bits, pool = np.random.PCG64(seeds), run * POOL
    if run == 1 or n <= pool:
        return np.argsort(bits.random_raw(n), kind="stable")
    runs = np.argsort(bits.random_raw(-(-n // run)), kind="stable")
    rows = (runs[:, None] * run + np.arange(run)).ravel()
    places = (np.arange(n, dtype=np.uint64) + bits.random_raw(n) % np.uint64(pool)) % np.uint64(n)
    return rows[rows < n][np.argsort(places, kind="stable")]
