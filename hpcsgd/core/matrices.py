"""Matrices: those of an FSDP model that an optimizer needs whole, and those of embeddings.

Of a matrix that an optimizer needs whole, this module gives the rows of each rank, and the rank that gathers
it. torch cuts a matrix of m rows along its rows into K parts of ⌈m/K⌉ rows; the last parts may have fewer
rows or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hpcsgd.core.balance import largest_first
from hpcsgd.core.layout import cost

BFLOAT16 = 2
"""Bytes of an element when it is sent: Muon orthogonalizes matrices in bfloat16."""


def owners(shapes: Sequence[torch.Size], K: int) -> list[int]:
    """Return which of K ranks gathers each of the matrices whole; the work is about equal."""
    return largest_first([cost(shape) for shape in shapes], K)


def rows_by_rank(shape: torch.Size, K: int) -> list[int]:
    """Return how many rows of a matrix each of K ranks holds."""
    most = -(-shape[0] // K)
    return [min(max(shape[0] - j * most, 0), most) for j in range(K)]


def bytes_by_period(periods: Mapping[nn.Parameter, int], K: int) -> dict[int, float]:
    """Return the bytes that a rank sends in an all-to-all of all matrices of a period: the mean of K ranks.

    `periods`: for each matrix, in the order of the buckets, the number of steps from one that needs it whole
    to the next. The all-to-all back sends as many bytes.
    """
    found = defaultdict[int, float](float)
    shapes = [param.shape for param in periods]
    for shape, owner, period in zip(shapes, owners(shapes, K), periods.values(), strict=True):
        rows = shape[0] - rows_by_rank(shape, K)[owner]
        found[period] += BFLOAT16 * rows * shape[1] / K
    return dict(found)


def embeddings_of(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the weights of the embeddings of `model`, which are found by the type of their module.

    An output layer that shares the weight of an embedding has the same parameter.
    """
    layers = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return frozenset(p for m in layers for p in m.parameters(recurse=False) if p.dim() == 2)
