"""What a sparse exchange sends, told before there are gradients.

Where selections are everybody's own their union depends on the gradients: here they are taken to be
independent, M·(1 − (1 − d)ⁿ). Workers that see alike gradients select alike elements, and their union is
less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout, Over
from hpcsgd.errors import UserError
from hpcsgd.parts.grad_reduces.codecs import Codec
from hpcsgd.parts.grad_reduces.combining import Combine, per_worker, union
from hpcsgd.parts.sparsifiers.base import Expected, Foreseeing, Sparsifier


def expected(sparsifier: Sparsifier, n: int, m: ModelLayout) -> Expected:
    """Raises `UserError` for a sparsifier that sends as many elements as there happen to be."""
    if not isinstance(sparsifier, Foreseeing):
        raise UserError(
            f"{type(sparsifier).__name__}: how many elements it selects depends on the gradients, and so "
            "what it sends cannot be told beforehand"
        )
    return sparsifier.expected(m.M, m.layers, n)


def messages(
    sparsifier: Sparsifier, combine: Combine, codec: Codec, over: Over, m: ModelLayout
) -> Iterator[CommOp]:
    """Of one exchange, once the last gradient is there. Raises `UserError` as `expected` does."""
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
    values = -(-(x.joint + 1) // n) * n * width  # and what is left of acc, as one more
    yield CommOp("alltoall", over, values, "values")
    yield CommOp("allgather", over, values, "values")


def of_per_worker(x: Expected, codec: Codec, over: Over, n: int, width: int) -> Iterator[CommOp]:
    yield from _indices(x, codec, over, n)
    yield CommOp("allgatherv", over, n * (x.each + 1) * width, "values")


TRAFFIC: Mapping[Combine, Callable[[Expected, Codec, Over, int, int], Iterator[CommOp]]] = {
    union: of_union,
    per_worker: of_per_worker,
}


def _indices(x: Expected, codec: Codec, over: Over, n: int) -> Iterator[CommOp]:
    yield CommOp("allgather", over, n * 2 * FLOAT64, "indices")
    yield CommOp("allgatherv", over, n * x.each * codec.bytes_per_index(x.density), "indices")
