"""The messages that groups send about each vector at a synchronization of `sparseloco`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd import kernels
from hpcsgd.core.norm import squared_norm
from hpcsgd.core.topology import Topology
from hpcsgd.parts.quantizers.base import Quantizer
from hpcsgd.parts.sparsifiers.base import Share


@dataclass(frozen=True)
class SparseMessage:
    """The format of the message about one vector: indices and values of the selected elements.

    `share` says how many elements of which block are selected, and so determines the size of the message.
    """

    share: Share
    values: Quantizer

    @property
    def count(self) -> int:
        return int(self.share.k.sum())

    @property
    def nbytes(self) -> int:
        return self._places() + self.values.nbytes(self.count)

    def write(self, e: Tensor, code: Tensor) -> None:
        chosen = self.share.largest_of(e)
        places = kernels.encode_chosen(chosen, *self._segments())
        code[: places.numel()] = places
        self.values.encode(e[chosen].float(), code[self._places() :], 0)

    def read(self, code: Tensor) -> tuple[Tensor, Tensor]:
        places = code[: kernels.chosen_bytes(*self._segments())]
        values = torch.empty(self.count, dtype=torch.float32, device=code.device)
        self.values.decode(code[self._places() :], values)
        return kernels.decode_chosen(places, *self._segments()), values

    def _segments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.share.starts, self.share.stops, self.share.k

    def _places(self) -> int:
        """Return the bytes of the indices, rounded up to a multiple of 4, so that floats can follow."""
        return -(-kernels.chosen_bytes(*self._segments()) // 4) * 4


def gathered(
    codes: Sequence[SparseMessage], errors: Sequence[Tensor], topology: Topology
) -> list[list[Tensor]]:
    """Gather the messages of all groups; return, for each vector, a list with one message per group.

    `errors` are the vectors from which this group's messages are made. Collective over the groups.
    """
    sizes = [code.nbytes for code in codes]
    mine = torch.zeros(sum(sizes), dtype=torch.uint8, device=errors[0].device)
    for code, e, part in zip(codes, errors, torch.split(mine, sizes), strict=True):
        if code.count:  # a rank may own nothing of a fragment
            code.write(e, part)
    rows = mine.new_empty((topology.num_groups, mine.numel()))
    if mine.numel():
        topology.inter_group.allgather(rows.view(-1), mine).wait()
    return [list(column) for column in torch.split(rows, sizes, dim=1)]


def norms(
    codes: Sequence[SparseMessage], said: Sequence[Sequence[Tensor]], topology: Topology
) -> list[float]:
    """Return ‖v_r‖ of the values that each group r has sent, with all its ranks. Collective in the group.

    `said` is the result of `gathered`.
    """
    squares = torch.zeros(topology.num_groups, dtype=torch.float64, device=said[0][0].device)
    for code, parts in zip(codes, said, strict=True):
        for group, part in enumerate(parts if code.count else ()):
            squares[group] += squared_norm(code.read(part.contiguous())[1].double())
    topology.intra_group.allreduce(squares).wait()
    return [square.item() ** 0.5 for square in squares]
