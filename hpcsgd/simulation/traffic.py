"""Who waits for whom where a rule knows it beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hpcsgd.core.graphs import Graph


@dataclass(frozen=True)
class Traffic:
    """Whom a step of a rule waits for, as far as that is known beforehand."""

    every: int | None = None
    """All groups meet in every so many steps."""
    graph: Graph | None = None
    """Who sends to whom in every step."""
    lag: int | None = None
    """A step needs what others sent so many steps before; None: nothing of others."""
    own_lag: int = 0
    """The own message of so many steps before has to be there."""


@runtime_checkable
class Scheduled(Protocol):
    """A rule that knows beforehand."""

    def traffic(self) -> Traffic: ...
