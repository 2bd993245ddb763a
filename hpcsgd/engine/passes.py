"""The number of backward passes of a step that have computed each gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Generic, TypeVar

from torch import nn

from hpcsgd.engine.sending import call_on_arrival

Key = TypeVar("Key")
"""What stands for a gradient: its slot, or the number of its parameter."""


class PassCounts(Generic[Key]):
    """Counts the backward passes of a step for each gradient; `exists` tells if a gradient still exists.

    A pass inside `no_sync()` counts as none: its gradients wait for a later pass.
    """

    def __init__(self, expected: int, exists: Callable[[Key], bool]) -> None:
        self.expected = expected
        """Passes before each update; may change between two steps."""
        self._exists = exists
        self.counts: dict[Key, int] = {}
        """Number of passes that have computed a gradient, without those inside `no_sync()`. A gradient that
        no pass has computed is missing."""
        self.in_no_sync = False
        """True inside `no_sync()`."""
        self._local: set[Key] = set()
        self._open = 0

    def add(self, key: Key) -> bool:
        """Count a pass that has computed the gradient `key`; return True if it was the last of the step."""
        if self.in_no_sync:
            self._local.add(key)
            self.counts.setdefault(key, 0)
            return False
        count = self.counts[key] = self.counts.get(key, 0) + 1
        return count == self.expected

    def start_over(self) -> None:
        """Start at 0: the gradients of the passes so far have been used, or will not be used."""
        self.counts.clear()
        self._local.clear()

    @contextlib.contextmanager
    def no_sync(self, at_end: Callable[[Collection[Key]], None]) -> Generator[None, None, None]:
        """Return a block whose passes count as none. Blocks may be nested.

        At the end of the outermost one `at_end` gets the gradients that passes inside have computed.
        """
        self._open += 1
        self.in_no_sync = True
        try:
            yield
        finally:
            self._open -= 1
            self.in_no_sync = self._open > 0
            if not self.in_no_sync:
                found = [key for key in self._local if self._exists(key)]
                self._local.clear()
                at_end(found)

    @property
    def accumulated(self) -> int:
        """Number of passes of this step whose gradients still exist, without those inside `no_sync()`."""
        return max((n for key, n in self.counts.items() if self._exists(key)), default=0)

    @property
    def unfinished(self) -> str:
        """The passes of this step that still lack the last one, in words; "" if it was made, or none was."""
        there = self.accumulated
        if 0 < there < self.expected:
            return f"{there} of the {self.expected} backward passes of a step"
        local = not there and any(map(self._exists, self.counts))
        return "backward passes inside no_sync()" if local else ""


class Passes:
    """Counts the passes for gradients that are not reduced.

    It sets its hooks once a step may have more than one pass.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self.passes = PassCounts[int](1, lambda number: self._params[number].grad is not None)
        self._counting = False

    def expect(self, passes: int) -> None:
        """Expect `passes` backward passes before each step."""
        self.passes.expected = passes
        if passes > 1:
            self.count()

    def count(self) -> None:
        """Begin to count passes."""
        if not self._counting:
            self._counting = True
            for number, param in enumerate(self._params):
                call_on_arrival(param, self._count, number)

    def _count(self, number: int) -> None:
        self.passes.add(number)
