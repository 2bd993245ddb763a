"""The squared norm of the gradient, in steps for which it was requested."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpcsgd.core.flat import Bucket
from hpcsgd.core.norm import as_vector
from hpcsgd.core.step import squared_norm_of


class GradientNorm:
    """This rank's part of ‖g‖², where g is the group's gradient as the update uses it.

    The parts of all ranks of a group add up to ‖g‖². Clipping uses another norm: that before clipping, over
    all ranks.
    """

    def __init__(self, *, reduced: bool) -> None:
        self._reduced = reduced
        self._wanted = False
        self._parts: list[Tensor] = []

    def want(self) -> None:
        """Request the squared norm for the next update."""
        self._wanted = True

    def see(self, buckets: Sequence[Bucket]) -> None:
        """If the norm was requested, add that of the gradients of `buckets`, which the update uses next."""
        if self._wanted:
            # One norm per bucket: the number of buckets in a call depends on timing, and one norm for all
            # of them would change the last bits of the sum.
            self._parts += [squared_norm_of([b], reduced=self._reduced) for b in buckets]

    def take(self) -> Tensor | None:
        """Return this rank's part of ‖g‖² of the last update, on its device; None if not requested."""
        parts, self._wanted, self._parts = self._parts, False, []
        return as_vector(parts).sum() if parts else None
