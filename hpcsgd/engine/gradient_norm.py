"""How long the gradient is, in those steps in which somebody wants to know."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpcsgd.core.flat import Bucket
from hpcsgd.core.norm import as_vector
from hpcsgd.core.step import squared_norm_of


class GradientNorm:
    """This position's part of ‖g‖², the group's gradient as the update uses it: over a group they add up.

    Not to be confused with the norm that clipping goes by: that is of before it, and of all positions.
    """

    def __init__(self, *, exchanged: bool) -> None:
        self._exchanged = exchanged
        self._wanted = False
        self._parts: list[Tensor] = []

    def want(self) -> None:
        """In the next update."""
        self._wanted = True

    def see(self, buckets: Sequence[Bucket]) -> None:
        """These are about to be used."""
        if self._wanted:
            # Each by itself: how many come at once depends on who was fast, and the sum's last bits on that.
            self._parts += [squared_norm_of([b], exchanged=self._exchanged) for b in buckets]

    def take(self) -> Tensor | None:
        """That of the last update, where it is, if it was wanted."""
        parts, self._wanted, self._parts = self._parts, False, []
        return as_vector(parts).sum() if parts else None
