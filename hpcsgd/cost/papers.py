"""The papers' own cost models, as functions of numbers or numpy arrays, to draw the papers' figures.

`hpcsgd.cost.price` predicts the times of hpcsgd on a measured machine. This module only repeats the papers'
formulas. α is the seconds that each message takes, β the seconds that each byte adds, P the number of groups,
K the number of ranks in each, and M the size of the model.

In the docstrings H is S. Lee et al., IEEE Big Data 2020, section III-C, and S is M. Assran et al., ICML 2019,
section 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpcsgd.cost.collectives import seconds, sent

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """The quantities in the formulas that do not depend on the number of ranks.

    `samples` is N_s, the samples of an epoch. Groups have batches of B samples and average their models every
    I steps. `nbytes` is M, the size of the model in bytes. `alpha` and `beta` are in seconds.
    """

    samples: float
    B: float
    I: float  # noqa: E741 - the papers' letter
    nbytes: float
    alpha: float
    beta: float

    def steps(self, P: ArrayLike) -> Numbers:
        """Return the number of steps in an epoch with P groups: N_s / (B·P)."""
        return self.samples / (self.B * np.asarray(P, float))


def allreduce_epoch(s: Setting, P: ArrayLike, K: ArrayLike) -> Numbers:
    """Return the seconds of communication in an epoch of local SGD with allreduces of the whole model.

    This is H eq. 5 (T_allreduce). The paper's log K in the latency of its second term is a misprint for
    log P.
    """
    gradients = seconds("allreduce", s.nbytes, K, s.alpha, s.beta)
    models = seconds("allreduce", s.nbytes, P, s.alpha, s.beta)
    return s.steps(P) * (gradients + models / s.I)


def hierarchical_epoch(s: Setting, P: ArrayLike, K: ArrayLike) -> Numbers:
    """Return the seconds of communication in an epoch of hierarchical local SGD, by H eqs. 6 to 8.

    They are T_0 + T_1 + T_2: T_0 for the all-to-all, T_1 for the allreduce of M/K every I steps, and T_2 for
    the allgather.
    """
    T0 = seconds("alltoall", s.nbytes, K, s.alpha, s.beta)
    T1 = seconds("allreduce", s.nbytes / np.asarray(K, float), P, s.alpha, s.beta)
    T2 = seconds("allgather", s.nbytes, K, s.alpha, s.beta)
    return s.steps(P) * (T0 + T1 / s.I + T2)


def synchronous_epoch(s: Setting, N: ArrayLike) -> Numbers:
    """Return the seconds of communication in an epoch of synchronous SGD, the other baseline in H.

    Each step has one batch of B samples and one allreduce over N ranks.
    """
    return s.samples / s.B * seconds("allreduce", s.nbytes, N, s.alpha, s.beta)


def allreduce_step(compute: float, nbytes: float, n: ArrayLike, alpha: float, beta: float) -> Numbers:
    """Return the seconds of a step of AR-SGD in S: allreduce SGD over n nodes, which hides no messages."""
    return compute + seconds("allreduce", nbytes, n, alpha, beta)


def gossip_step(compute: float, nbytes: float, peers: ArrayLike, alpha: float, beta: float) -> Numbers:
    """Return the seconds of a step of SGP or D-PSGD: messages to `peers` groups, one by one, none hidden."""
    return compute + np.asarray(peers, float) * (alpha + float(sent("sendrecv", nbytes, 2)) * beta)


def overlap_step(compute: float, nbytes: float, peers: ArrayLike, alpha: float, beta: float) -> Numbers:
    """Return the seconds of a step of τ-OSGP in S with τ ≥ 1, where computation hides the messages."""
    return np.maximum(compute, gossip_step(0.0, nbytes, peers, alpha, beta))
