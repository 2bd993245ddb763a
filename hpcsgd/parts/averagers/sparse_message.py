"""The message that a group sends about one vector at a synchronization of `sparseloco`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd import kernels
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
