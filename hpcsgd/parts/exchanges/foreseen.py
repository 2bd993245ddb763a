"""What a sparse exchange sends, told before there are gradients.

Where selections are everybody's own their union depends on the gradients: here they are taken to be
independent, M·(1 − (1 − d)ⁿ). Workers that see alike gradients select alike elements, and their union is
less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hpcsgd.core.traffic import FLOAT64, Message, Over, Sizes
from hpcsgd.errors import UserError
from hpcsgd.parts.exchanges.codecs import Codec
from hpcsgd.parts.exchanges.combining import Combine, everyones, own
from hpcsgd.parts.sparsifiers.base import Expected, Foreseeing, Sparsifier


def expected(sparsifier: Sparsifier, n: int, m: Sizes) -> Expected:
    """Raises `UserError` for a sparsifier that sends as many elements as there happen to be."""
    if not isinstance(sparsifier, Foreseeing):
        raise UserError(
            f"{type(sparsifier).__name__}: how many elements it selects depends on the gradients, and so "
            "what it sends cannot be told beforehand"
        )
    return sparsifier.expected(m.M, m.layers, n)


def messages(
    sparsifier: Sparsifier, combine: Combine, codec: Codec, over: Over, m: Sizes
) -> Iterator[Message]:
    """Of one exchange, once the last gradient is there. Raises `UserError` as `expected` does."""
    n = m.ranks(over)
    if n == 1:
        return
    x = expected(sparsifier, n, m)
    width = max(4, *(b.width for b in m.buckets))
    if x.allocation:
        yield Message("bcast", over, x.allocation, "allocation")
    yield from TRAFFIC[combine](x, codec, over, n, width)


def of_everyones(x: Expected, codec: Codec, over: Over, n: int, width: int) -> Iterator[Message]:
    if x.by_one:
        yield Message("bcast", over, 2 * FLOAT64, "indices")
        yield Message("bcast", over, x.joint * codec.bytes_per_index(x.density), "indices")
    else:
        yield from _indices(x, codec, over, n)
    values = -(-(x.joint + 1) // n) * n * width  # and what is left of acc, as one more
    yield Message("alltoall", over, values, "values")
    yield Message("allgather", over, values, "values")


def of_own(x: Expected, codec: Codec, over: Over, n: int, width: int) -> Iterator[Message]:
    yield from _indices(x, codec, over, n)
    yield Message("allgatherv", over, n * (x.each + 1) * width, "values")


TRAFFIC: Mapping[Combine, Callable[[Expected, Codec, Over, int, int], Iterator[Message]]] = {
    everyones: of_everyones,
    own: of_own,
}


def _indices(x: Expected, codec: Codec, over: Over, n: int) -> Iterator[Message]:
    yield Message("allgather", over, n * 2 * FLOAT64, "indices")
    yield Message("allgatherv", over, n * x.each * codec.bytes_per_index(x.density), "indices")
