"""Vectors of parameters seen as the tensors that lie in them: their norms, and factors for each of them.

A tensor is one parameter. A rank may own only a part of it, which may be cut once more by fragments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd.comm import Communicator
from hpcsgd.core.flat import Bucket
from hpcsgd.core.norm import as_vector, squared_norm
from hpcsgd.core.slot import Slot


@dataclass(frozen=True)
class TensorPart:
    """The elements `place` of vector number `vector`, which belong to tensor number `tensor`."""

    tensor: int
    vector: int
    place: slice


@dataclass(frozen=True)
class ByTensor:
    """The tensors of the model, bucket by bucket, and the parts of them that lie in a rank's vectors."""

    slots: Sequence[Slot]
    parts: Sequence[TensorPart]

    @classmethod
    def of_shards(cls, buckets: Sequence[Bucket], cuts: Sequence[Sequence[slice]] | None = None) -> ByTensor:
        """Return those in the `param_shard` of each bucket, or in the slices `cuts` of each, joined."""
        slots = _slots(buckets)
        number, parts, vector = {slot: i for i, slot in enumerate(slots)}, list[TensorPart](), 0
        for i, b in enumerate(buckets):
            if cuts is None or cuts[i]:  # buckets without elements of a fragment have no vector
                found = b.pieces(None if cuts is None else cuts[i])
                parts += [TensorPart(number[slot], vector, place) for slot, place in found]
                vector += 1
        return cls(slots, parts)

    @classmethod
    def of_buckets(cls, buckets: Sequence[Bucket], cuts: Sequence[Sequence[slice]] | None = None) -> ByTensor:
        """Return those in the `parameters` of each bucket, or in the slices `cuts` of each, joined."""
        slots = _slots(buckets)
        number, parts, vector = {slot: i for i, slot in enumerate(slots)}, list[TensorPart](), 0
        for i, b in enumerate(buckets):
            of_bucket = [slice(0, b.parameters.numel())] if cuts is None else cuts[i]
            start = 0
            for cut in of_bucket:
                for slot in b.slots:
                    low, high = max(slot.start, cut.start), min(slot.stop, cut.stop)
                    if low < high:
                        place = slice(start + low - cut.start, start + high - cut.start)
                        parts.append(TensorPart(number[slot], vector, place))
                start += cut.stop - cut.start
            vector += bool(of_bucket)
        return cls(slots, parts)

    def norms(self, vectors: Sequence[Tensor], ranks: Communicator | None) -> Tensor:
        """Return the norm of each tensor in `vectors`, as float64 on the host.

        With `ranks` the norms include the parts that those ranks have: collective, with 8 bytes per tensor.
        """
        squared = self.squares(vectors)
        if ranks is not None:
            ranks.allreduce(squared).wait()
        return squared.sqrt()

    def squares(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return the squared norm of each tensor in `vectors` of this rank, as float64 on the host."""
        total = [0.0] * len(self.slots)
        parts = [squared_norm(x) for _, x in self.views(vectors)]
        squares: list[float] = as_vector(parts).tolist() if parts else []
        for part, square in zip(self.parts, squares, strict=True):
            total[part.tensor] += square
        return torch.tensor(total, dtype=torch.float64, device="cpu")

    def scale(self, vectors: Sequence[Tensor], factors: Sequence[float]) -> None:
        """Multiply each tensor in `vectors` by its factor; 0 for 0, also if the tensor is not finite."""
        for tensor, x in self.views(vectors):
            if factors[tensor] == 0:
                x.zero_()
            elif factors[tensor] != 1:
                x.mul_(factors[tensor])

    def views(self, vectors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield each part in `vectors`, after the number of its tensor."""
        return ((part.tensor, vectors[part.vector][part.place]) for part in self.parts)


def _slots(buckets: Sequence[Bucket]) -> list[Slot]:
    return [slot for b in buckets for slot in b.slots]
