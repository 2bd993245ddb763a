"""How many backward passes of a step have been made, where gradients stay where autograd put them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hpcsgd.engine.sending import call_on_arrival


class Passes:
    """Counts from when more than one is to come before each step: who has one need not be asked."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._counts: dict[int, int] = {}
        self._counting = False
        self.expected = 1
        """How many are to come before each step."""

    def expect(self, passes: int) -> None:
        """So many are to come before each step."""
        self.expected = passes
        if passes > 1 and not self._counting:
            self._counting = True
            for number, param in enumerate(self._params):
                call_on_arrival(param, self._count, number)

    def start_over(self) -> None:
        """Those that were made have been used, or are not to be."""
        self._counts.clear()

    @property
    def accumulated(self) -> int:
        """How many of this step have brought gradients that are there."""
        there = (n for number, n in self._counts.items() if self._params[number].grad is not None)
        return max(there, default=0)

    def _count(self, number: int) -> None:
        self._counts[number] = self._counts.get(number, 0) + 1
