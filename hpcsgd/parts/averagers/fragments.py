"""Fragments: parts of the model that are synchronized separately. Each layer belongs to one fragment.

The parameters alone determine which elements belong to a fragment. So fragments are the same for groups of
any K, and for buckets of any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd.core.balance import in_order
from hpcsgd.core.elements import num_reals
from hpcsgd.core.flat import Bucket
from hpcsgd.core.slot import Slot

ShardPart = tuple[int, int, int]
"""(start, stop, fragment): the real numbers [start, stop) of a parameter, and their fragment's index."""


Place = tuple[str, int, int, int]
"""(name, start, stop, offset): the real numbers [start, stop) of a parameter are at `offset` in a vector."""


@dataclass(frozen=True)
class Fragment:
    """One fragment of the model: where its elements are in this rank's shard of every bucket, or in `w`."""

    cuts: Sequence[Sequence[slice]]
    """For each bucket, the slices of `param_shard`, or of `w`, that belong to the fragment."""

    def of(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the fragment's parts of `vectors`, which are cut like `param_shard`, or like `w`.

        There is one copy per bucket; buckets without elements of the fragment are left out. If no bucket has
        any, the result is one empty tensor.
        """
        pairs = zip(vectors, self.cuts, strict=True)
        return [torch.cat([x[c] for c in cuts]) for x, cuts in pairs if cuts] or [vectors[0][:0].clone()]

    def parts(self, vectors: Sequence[Tensor], mine: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the fragment's parts of `vectors`, each with the matching values of `mine`.

        `mine` has the shapes of `of(vectors)`.
        """
        rest = iter(mine)
        for x, cuts in zip(vectors, self.cuts, strict=True):
            if cuts:
                pieces = next(rest).split([c.stop - c.start for c in cuts])
                yield from zip((x[c] for c in cuts), pieces, strict=True)

    def dtypes(self, mine: Sequence[Tensor]) -> dict[int, torch.dtype]:
        """Return the dtype of each tensor in `mine` by the index of its bucket; `of` returns such tensors."""
        numbers = [i for i, cuts in enumerate(self.cuts) if cuts]
        return {i: x.dtype for i, x in zip(numbers, mine, strict=False)}


def fragments(buckets: Sequence[Bucket], F: int, *, whole: bool = False) -> list[Fragment]:
    """Return the model as F fragments of about the same size, in the buckets' shards; if `whole`, in `w`.

    A layer is the parameters of one module. It is assigned to the fragment with the fewest elements so far,
    in a tie to the first of them. A layer with more than 1/F of the model is first cut into equal pieces.
    Layers are assigned in the order of the forward pass, so that layers of one size go to all fragments in
    turn.
    """
    layers: dict[str, list[Slot]] = {}
    for slot in sorted((slot for b in buckets for slot in b.slots), key=lambda slot: slot.number):
        layers.setdefault(slot.name.rpartition(".")[0], []).append(slot)
    most = -(-sum(_size(slots) for slots in layers.values()) // F)
    cut: list[tuple[list[Slot], int, int]] = []
    for slots in layers.values():
        size = _size(slots)
        parts = -(-size // most)
        cut += [(slots, i * size // parts, (i + 1) * size // parts) for i in range(parts)]
    shares: dict[str, list[ShardPart]] = {}
    for (slots, low, high), p in zip(cut, in_order([high - low for _, low, high in cut], F), strict=True):
        for slot, start, stop in _within(slots, low, high):
            shares.setdefault(slot.name, []).append((start, stop, p))
    places = [list(_in_w(b) if whole else _in_shard(b)) for b in buckets]
    return [Fragment([_cuts(each, shares, p) for each in places]) for p in range(F)]


def put_together(
    owned: Sequence[Tensor], pieces: Sequence[tuple[Fragment, Sequence[Tensor]]]
) -> list[Tensor]:
    """Return vectors shaped like `owned`, with the values of the fragments in `pieces` and zeros elsewhere.

    `pieces` has pairs of a fragment and its values, in the shapes of `Fragment.of`.
    """
    dtypes: dict[int, torch.dtype] = {}
    for fragment, mine in pieces:
        dtypes.update(fragment.dtypes(mine))
    made = [torch.zeros_like(own, dtype=dtypes.get(i, own.dtype)) for i, own in enumerate(owned)]
    for fragment, mine in pieces:
        for view, values in fragment.parts(made, mine):
            view.copy_(values)
    return made


def _size(slots: Sequence[Slot]) -> int:
    return num_reals(slot.param for slot in slots)


def _within(slots: Sequence[Slot], low: int, high: int) -> Iterator[tuple[Slot, int, int]]:
    """Yield the parts of `slots` that lie in [low, high), if all slots are one sequence of real numbers."""
    start = 0
    for slot in slots:
        stop = start + _size([slot])
        if max(low, start) < min(high, stop):
            yield slot, max(low, start) - start, min(high, stop) - start
        start = stop


def _in_shard(bucket: Bucket) -> Iterator[Place]:
    for piece in bucket.ranges:
        yield piece.slot.name, piece.start * bucket.reals, piece.stop * bucket.reals, piece.offset


def _in_w(bucket: Bucket) -> Iterator[Place]:
    for slot in bucket.slots:
        first = slot.first * bucket.reals
        yield slot.name, first, first + slot.stop - slot.start, slot.start


def _cuts(places: Sequence[Place], shares: Mapping[str, Sequence[ShardPart]], p: int) -> list[slice]:
    """Return the slices of a bucket's vector that belong to fragment `p`, adjacent ones joined.

    `places` says where parameters are in the vector. `shares` says by parameter name which of its numbers
    belong to which fragment.
    """
    found: list[slice] = []
    for name, first, last, offset in places:
        for start, stop, fragment in shares[name]:
            low, high = max(start, first), min(stop, last)
            if fragment != p or low >= high:
                continue
            begin, end = (offset + x - first for x in (low, high))
            if found and found[-1].stop == begin:
                begin = found.pop().start
            found.append(slice(begin, end))
    return found
