"""Exchanges: how the gradients of a group's ranks come together."""

from collections.abc import Callable, Mapping

from hpcsgd.core.step import Exchange
from hpcsgd.parts.exchanges.codecs import Gaps, Plain
from hpcsgd.parts.exchanges.combining import everyones, own
from hpcsgd.parts.exchanges.dense import AcrossGroups, AllReduce, AllToAll, Dense, Gathered, ReduceScatter
from hpcsgd.parts.exchanges.feedback import ErrorFeedback, MomentumCorrection, RateInside
from hpcsgd.parts.exchanges.packed import Packed
from hpcsgd.parts.exchanges.sparse import Sparse

EXCHANGES: Mapping[str, Callable[..., Exchange]] = {
    "alltoall": AllToAll,
    "dense": Dense,
    "packed": Packed,
    "reduce_scatter": ReduceScatter,
    "sparse": Sparse,
}
"""As job files call them."""

__all__ = [
    "EXCHANGES",
    "AcrossGroups",
    "AllReduce",
    "AllToAll",
    "Dense",
    "ErrorFeedback",
    "Gaps",
    "Gathered",
    "MomentumCorrection",
    "Packed",
    "Plain",
    "RateInside",
    "ReduceScatter",
    "Sparse",
    "everyones",
    "own",
]
