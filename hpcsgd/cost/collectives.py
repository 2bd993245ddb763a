"""What an operation costs over p ranks, T = s·α + w·β: s messages after one another, w bytes a rank.

α is the seconds that a message takes, β the seconds of a byte. n is what a rank has in hand: the whole vector
of an alltoall, reduce_scatter, allreduce or bcast, what an allgather gathers, what an exchange sends to all
its peers. w is then counted as the ledger counts it.

S. Lee et al., IEEE Big Data 2020 ("the hierarchical local SGD paper"), section III-C: eq. 3 for the allreduce
of Rabenseifner, R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in
MPICH, IJHPCA 2005, for the others. All take numbers or numpy arrays of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """Of an operation: its s and its w / n, of p."""

    messages: Callable[[Numbers], Numbers]
    share: Callable[[Numbers], Numbers]


def _others(p: Numbers) -> Numbers:
    return p - 1


def _doublings(p: Numbers) -> Numbers:
    return np.log2(p)


def _all_but_own(p: Numbers) -> Numbers:
    return (p - 1) / p


SHAPES: Mapping[str, Shape] = {
    "allgather": Shape(_others, _all_but_own),
    "allgatherv": Shape(_others, _all_but_own),
    "allreduce": Shape(lambda p: 2 * np.log2(p), lambda p: 2 * (p - 1) / p),  # eq. 3
    "alltoall": Shape(_others, _all_but_own),
    "bcast": Shape(_doublings, _all_but_own),
    "exchange": Shape(np.ones_like, np.ones_like),
    "reduce_scatter": Shape(_others, _all_but_own),
}
"""By the names that `Communicator` gives its operations. An `exchange` goes to all peers at once."""


def messages(operation: str, p: ArrayLike) -> Numbers:
    """s: messages that have to wait for each other, over `p` ranks; none over one."""
    p = np.asarray(p, float)
    return np.where(p > 1, SHAPES[operation].messages(p), 0.0)


def sent(operation: str, n: ArrayLike, p: ArrayLike) -> Numbers:
    """w: bytes that a rank sends of `n`, over `p` ranks; none over one."""
    p = np.asarray(p, float)
    return np.where(p > 1, SHAPES[operation].share(p) * np.asarray(n, float), 0.0)


def seconds(operation: str, n: ArrayLike, p: ArrayLike, alpha: ArrayLike, beta: ArrayLike) -> Numbers:
    """s·α + w·β, of `alpha` seconds and `beta` seconds a byte."""
    return messages(operation, p) * np.asarray(alpha) + sent(operation, n, p) * np.asarray(beta)
