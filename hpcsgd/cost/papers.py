"""The papers' own cost models, over numbers or numpy arrays, to draw the papers' figures.

`hpcsgd.cost.price` predicts what our code takes on a measured machine. This module only repeats the papers'
formulas. α is the seconds of a message. β is the seconds of a byte here, because w counts bytes.

H: S. Lee et al., IEEE Big Data 2020, section III-C. S: M. Assran et al., ICML 2019, section 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpcsgd.cost.collectives import seconds, sent

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """N_s samples per epoch, batches of B per group, a model average every I steps, `nbytes` of model."""

    samples: float
    B: float
    I: float  # noqa: E741 - the papers' letter
    nbytes: float
    alpha: float
    beta: float

    def steps(self, P: ArrayLike) -> Numbers:
        """Return the steps of an epoch: N_s / (B·P)."""
        return self.samples / (self.B * np.asarray(P, float))


def allreduce_epoch(s: Setting, P: ArrayLike, K: ArrayLike) -> Numbers:
    """Return T_allreduce of H eq. 5: local SGD with allreduces of all M.

    The paper's log K in the second latency is a misprint for log P.
    """
    gradients = seconds("allreduce", s.nbytes, K, s.alpha, s.beta)
    models = seconds("allreduce", s.nbytes, P, s.alpha, s.beta)
    return s.steps(P) * (gradients + models / s.I)


def hierarchical_epoch(s: Setting, P: ArrayLike, K: ArrayLike) -> Numbers:
    """Return T_0 + T_1 + T_2 of H eqs. 6 to 8: all-to-all, allreduce of M/K every I steps, allgather."""
    T0 = seconds("alltoall", s.nbytes, K, s.alpha, s.beta)
    T1 = seconds("allreduce", s.nbytes / np.asarray(K, float), P, s.alpha, s.beta)
    T2 = seconds("allgather", s.nbytes, K, s.alpha, s.beta)
    return s.steps(P) * (T0 + T1 / s.I + T2)


def synchronous_epoch(s: Setting, N: ArrayLike) -> Numbers:
    """Return the epoch of synchronous SGD, H's other baseline: one batch of B and one allreduce per step."""
    return s.samples / s.B * seconds("allreduce", s.nbytes, N, s.alpha, s.beta)


def allreduce_step(compute: float, nbytes: float, n: ArrayLike, alpha: float, beta: float) -> Numbers:
    """Return the step of AR-SGD in S, which hides no communication."""
    return compute + seconds("allreduce", nbytes, n, alpha, beta)


def gossip_step(compute: float, nbytes: float, peers: ArrayLike, alpha: float, beta: float) -> Numbers:
    """Return the step of SGP or D-PSGD: messages to `peers` neighbours, one after another, none hidden."""
    return compute + np.asarray(peers, float) * (alpha + float(sent("exchange", nbytes, 2)) * beta)


def overlap_step(compute: float, nbytes: float, peers: ArrayLike, alpha: float, beta: float) -> Numbers:
    """Return the step of τ-OSGP, τ ≥ 1: computation of the next steps hides the messages."""
    return np.maximum(compute, gossip_step(0.0, nbytes, peers, alpha, beta))
