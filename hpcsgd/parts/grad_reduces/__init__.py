"""Gradient reductions: how the gradients of a group's ranks are averaged."""

from collections.abc import Callable, Mapping

from hpcsgd.core.step import GradReduce
from hpcsgd.parts.grad_reduces.codecs import Gaps, Plain
from hpcsgd.parts.grad_reduces.combining import per_worker, union
from hpcsgd.parts.grad_reduces.dense import (
    AcrossGroups,
    AllReduce,
    AllToAll,
    Dense,
    ReduceScatter,
    WithAllgather,
)
from hpcsgd.parts.grad_reduces.error_feedback import ErrorFeedback, LrInErrorFeedback, MomentumCorrection
from hpcsgd.parts.grad_reduces.quantized import Quantized
from hpcsgd.parts.grad_reduces.sparse import Sparse

GRAD_REDUCES: Mapping[str, Callable[..., GradReduce]] = {
    "alltoall": AllToAll,
    "dense": Dense,
    "quantized": Quantized,
    "reduce_scatter": ReduceScatter,
    "sparse": Sparse,
}
"""The gradient reductions, by their names in job files."""

__all__ = [
    "GRAD_REDUCES",
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
    "per_worker",
    "union",
]
