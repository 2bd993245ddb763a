"""Exchanges: how the gradients of a group's ranks come together."""

from collections.abc import Callable, Mapping

from hpcsgd.core.step import GradReduce
from hpcsgd.parts.exchanges.codecs import Gaps, Plain
from hpcsgd.parts.exchanges.combining import everyones, own
from hpcsgd.parts.exchanges.dense import (
    AcrossGroups,
    AllReduce,
    AllToAll,
    Dense,
    ReduceScatter,
    WithAllgather,
)
from hpcsgd.parts.exchanges.feedback import ErrorFeedback, LrInErrorFeedback, MomentumCorrection
from hpcsgd.parts.exchanges.packed import Quantized
from hpcsgd.parts.exchanges.sparse import Sparse

EXCHANGES: Mapping[str, Callable[..., GradReduce]] = {
    "alltoall": AllToAll,
    "dense": Dense,
    "quantized": Quantized,
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
    "LrInErrorFeedback",
    "MomentumCorrection",
    "Plain",
    "Quantized",
    "ReduceScatter",
    "Sparse",
    "WithAllgather",
    "everyones",
    "own",
]
