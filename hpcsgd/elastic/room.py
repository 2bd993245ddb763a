"""Memory for the result of an average, which must not overwrite the averaged tensors before all have it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpcsgd.comm import accumulation_dtype
from hpcsgd.comm.on_host import room_for


class Room:
    """Memory for means of tensors.

    It is kept from round to round, because the first access to new memory costs as much time as the sum
    itself.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def of(self, w: Sequence[Tensor]) -> list[Tensor]:
        """Return memory for the mean of `w`, in float32 for 16-bit floats, because it first holds a sum."""
        if [(x.shape, x.dtype) for x in self._kept] != [(x.shape, accumulation_dtype(x.dtype)) for x in w]:
            self._kept = [room_for(x, accumulation_dtype(x.dtype)) for x in w]
        return self._kept
