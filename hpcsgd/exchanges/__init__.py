"""Exchanges: how the gradients of a group's ranks come together."""

from hpcsgd.exchanges.codecs import Gaps, Plain
from hpcsgd.exchanges.combining import everyones, own
from hpcsgd.exchanges.dense import AcrossGroups, AllReduce, AllToAll, Gathered, ReduceScatter
from hpcsgd.exchanges.feedback import ErrorFeedback, MomentumCorrection, RateInside
from hpcsgd.exchanges.sparse import Sparse

__all__ = [
    "AcrossGroups",
    "AllReduce",
    "AllToAll",
    "ErrorFeedback",
    "Gaps",
    "Gathered",
    "MomentumCorrection",
    "Plain",
    "RateInside",
    "ReduceScatter",
    "Sparse",
    "everyones",
    "own",
]
