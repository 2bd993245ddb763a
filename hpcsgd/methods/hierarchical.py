"""Hierarchical local SGD: groups of K train local models and meet every I steps.

S. Lee, Q. Kang, A. Agrawal, A. Choudhary, W. Liao: Communication-Efficient Local Stochastic Gradient Descent
for Scalable Deep Learning, IEEE Big Data 2020, section III-B ("the hierarchical local SGD paper" elsewhere):

    1  all-to-all in the group: position j receives the K versions of chunk j of the gradient
    2  position j averages them and updates chunk j
    3  every I steps: allreduce of chunk j over the groups, times 1/P
    4  allgather in the group

A step sends 2·(K−1)/K·M, a meeting 2·(P−1)/P·M/K elements a rank: K times less than the baseline below,
which allreduces all of M (eqs. 5 to 8).

Differences from the paper: its update is SGD or Adam, here any optimizer (whole-tensor ones after one more
allgather); it leaves the moments' fate open, here they are kept unless asked otherwise; the gradient's
transfer overlaps the backward pass but not the next forward pass.
"""

from __future__ import annotations

from hpcsgd.averagers import AroundMoments, Mean, MeanOfAll, Measured, kept
from hpcsgd.core.step import Exchange, Method
from hpcsgd.exchanges import AllReduce, AllToAll
from hpcsgd.schedules import Every


def hierarchical(
    every: int,
    exchange: Exchange = AllToAll(),  # noqa: B008 - frozen
    moments: AroundMoments = kept,
) -> Method:
    """Groups average the chunks they own after every `every` steps (I).

    `exchange` is `AllToAll()` as in the paper or `ReduceScatter()`; `moments` is `kept`, `Averaged` or
    `Reset`. The distance D of each meeting (eq. 9) is noted.
    """
    return Method(exchange=exchange, when=Every(every), how=moments(Measured(Mean())))


def allreduce_local_sgd(every: int, moments: AroundMoments = kept) -> Method:
    """The paper's baseline (eq. 5): the same training with allreduces of all M in the group and across."""
    return Method(exchange=AllReduce(), when=Every(every), how=moments(Measured(MeanOfAll())))
