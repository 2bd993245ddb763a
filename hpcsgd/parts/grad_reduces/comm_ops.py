"""Predict what a sparse gradient reduction sends, before there are gradients.

If n workers each select a fraction d of M elements, the size of the union of their selections depends on the
gradients. The prediction assumes that workers select independently: the union then has M·(1 − (1 − d)ⁿ)
elements. Workers with similar gradients select similar elements, so that the real union is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout, Over
from hpcsgd.errors import UserError
from hpcsgd.parts.grad_reduces.codecs import Codec
from hpcsgd.parts.grad_reduces.combining import Combine, per_worker, union
from hpcsgd.parts.sparsifiers.base import Expected, Foreseeing, Sparsifier


def expected(sparsifier: Sparsifier, n: int, m: ModelLayout) -> Expected:
    """Return how many elements `sparsifier` is expected to select on n workers, from the model `m`.

    Raise `UserError` if this number depends on the gradients.
    """
    if not isinstance(sparsifier, Foreseeing):
        raise UserError(
            f"{type(sparsifier).__name__}: how many elements it selects depends on the gradients, so "
            "what it sends cannot be predicted"
        )
    return sparsifier.expected(m.M, m.layers, n)


def messages(
    sparsifier: Sparsifier, combine: Combine, codec: Codec, over: Over, m: ModelLayout
) -> Iterator[CommOp]:
    """Yield the operations of one sparse reduction, which run after the last gradient of a step.

    `over` are the ranks that are the workers. Raises `UserError` as `expected` does.
    """
    n = m.ranks(over)
    if n == 1:
        return
    x = expected(sparsifier, n, m)
    width = max(4, *(b.width for b in m.buckets))
    if x.allocation:
        yield CommOp("bcast", over, x.allocation, "allocation")
    yield from TRAFFIC[combine](x, codec, over, n, width)


def of_union(x: Expected, codec: Codec, over: Over, n: int, width: int) -> Iterator[CommOp]:
    if x.by_one:
        yield CommOp("bcast", over, 2 * FLOAT64, "indices")
        yield CommOp("bcast", over, x.joint * codec.bytes_per_index(x.density), "indices")
    else:
        yield from _indices(x, codec, over, n)
    values = -(-(x.joint + 1) // n) * n * width  # one more for the norm of what remains
    yield CommOp("alltoall", over, values, "values")
    yield CommOp("allgather", over, values, "values")


def of_per_worker(x: Expected, codec: Codec, over: Over, n: int, width: int) -> Iterator[CommOp]:
    yield from _indices(x, codec, over, n)
    yield CommOp("allgatherv", over, n * (x.each + 1) * width, "values")


TRAFFIC: Mapping[Combine, Callable[[Expected, Codec, Over, int, int], Iterator[CommOp]]] = {
    union: of_union,
    per_worker: of_per_worker,
}
"""For each function that combines selections, the function that predicts its operations."""


def _indices(x: Expected, codec: Codec, over: Over, n: int) -> Iterator[CommOp]:
    yield CommOp("allgather", over, n * 2 * FLOAT64, "indices")
    yield CommOp("allgatherv", over, n * x.each * codec.bytes_per_index(x.density), "indices")
