"""The number of backward passes of a step that have computed each gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import nn

from hpcsgd.engine.sending import call_on_arrival

Key = TypeVar("Key")
"""What stands for a gradient: its slot, or the number of its parameter."""


class PassCounts(Generic[Key]):
    """Counts the backward passes of a step for each gradient; `exists` tells if a gradient still exists."""

    def __init__(self, expected: int, exists: Callable[[Key], bool]) -> None:
        self.expected = expected
        """Passes before each update; may change between two steps."""
        self._exists = exists
        self.counts: dict[Key, int] = {}
        """Number of passes that have computed a gradient; a gradient that no pass has computed is missing."""

    def add(self, key: Key) -> bool:
        """Count a pass that has computed the gradient `key`; return True if it was the last of the step."""
        count = self.counts[key] = self.counts.get(key, 0) + 1
        return count == self.expected

    def start_over(self) -> None:
        """Start at 0: the gradients of the passes so far have been used, or will not be used."""
        self.counts.clear()

    @property
    def accumulated(self) -> int:
        """Number of passes of this step whose gradients still exist."""
        return max((n for key, n in self.counts.items() if self._exists(key)), default=0)


class Passes:
    """Counts the passes for gradients that are not reduced; hooks are set once more than one is expected."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self.passes = PassCounts[int](1, lambda number: self._params[number].grad is not None)
        self._counting = False

    def expect(self, passes: int) -> None:
        """Expect `passes` backward passes before each step."""
        self.passes.expected = passes
        if passes > 1 and not self._counting:
            self._counting = True
            for number, param in enumerate(self._params):
                call_on_arrival(param, self._count, number)

    def _count(self, number: int) -> None:
        self.passes.add(number)
