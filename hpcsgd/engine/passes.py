"""The number of backward passes of a step, for gradients that are not reduced."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hpcsgd.engine.sending import call_on_arrival


class Passes:
    """Counts the backward passes of a step; hooks are set once more than one pass is expected."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._counts: dict[int, int] = {}
        self._counting = False
        self.expected = 1
        """Number of passes expected before each step."""

    def expect(self, passes: int) -> None:
        """Expect `passes` backward passes before each step."""
        self.expected = passes
        if passes > 1 and not self._counting:
            self._counting = True
            for number, param in enumerate(self._params):
                call_on_arrival(param, self._count, number)

    def start_over(self) -> None:
        """Start at 0: the gradients of the passes so far have been used, or will not be used."""
        self._counts.clear()

    @property
    def accumulated(self) -> int:
        """Number of passes of this step whose gradients still exist."""
        there = (n for number, n in self._counts.items() if self._params[number].grad is not None)
        return max(there, default=0)

    def _count(self, number: int) -> None:
        self._counts[number] = self._counts.get(number, 0) + 1
