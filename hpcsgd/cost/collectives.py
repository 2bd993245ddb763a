"""The time of an operation over p ranks, T = s·α + w·β: s consecutive messages, w bytes sent per rank.

α is the seconds that each message takes, and β those that each of its bytes adds. n is the size in bytes of
the operation's vector: the whole vector of an alltoall, reduce_scatter, allreduce or bcast, and the gathered
vector of an allgather. For a sendrecv n is the bytes that a rank sends to all its peers together. `CommStats`
counts bytes in the same way as w.

References: S. Lee et al., IEEE Big Data 2020 ("the hierarchical local SGD paper"), section III-C, eq. 3 for
Rabenseifner's allreduce. R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication
Operations in MPICH, IJHPCA 2005, for the others. All functions take numbers or numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """The number of messages and the share of bytes that an operation sends, as functions of p ranks."""

    messages: Callable[[Numbers], Numbers]
    """s, the number of consecutive messages."""
    share: Callable[[Numbers], Numbers]
    """w / n, the bytes that a rank sends as a share of the vector's size."""


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
    "sendrecv": Shape(np.ones_like, np.ones_like),
    "reduce_scatter": Shape(_others, _all_but_own),
}
"""The `Shape` of each operation, by `CommOp.operation`. A `sendrecv` sends to all peers at once."""


def messages(operation: str, p: ArrayLike) -> Numbers:
    """Return s, the number of consecutive messages of `operation` over `p` ranks; 0 for one rank."""
    p = np.asarray(p, float)
    return np.where(p > 1, SHAPES[operation].messages(p), 0.0)


def sent(operation: str, n: ArrayLike, p: ArrayLike) -> Numbers:
    """Return w, the bytes that a rank sends for a vector of `n` bytes over `p` ranks; 0 for one rank."""
    p = np.asarray(p, float)
    return np.where(p > 1, SHAPES[operation].share(p) * np.asarray(n, float), 0.0)


def seconds(operation: str, n: ArrayLike, p: ArrayLike, alpha: ArrayLike, beta: ArrayLike) -> Numbers:
    """Return the seconds s·α + w·β of `operation`, with `alpha` in seconds and `beta` in seconds per byte."""
    return messages(operation, p) * np.asarray(alpha) + sent(operation, n, p) * np.asarray(beta)
