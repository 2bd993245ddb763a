"""Values that say which groups wait for which; each method has one, and simulations use it.

An averager has such a value in its `Traits`, without a period. `waits_of` (`hpcsgd.core.method`) adds the
period of the method's schedule; `StepPlan.waits` is the result. An averager around another averager copies
the value of the inner one, and changes the copy with `later` if it uses results later.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from hpcsgd.core.graphs import Graph
from hpcsgd.errors import UserError, count_text

Period = int | Fraction
"""The n-th synchronization comes after step ⌈n·period⌉."""


@dataclass(frozen=True)
class All:
    """All groups wait for each other. They use the result `late` steps later."""

    late: int = 0
    period: Period | None = None
    """None: it is not known in advance after which steps groups wait."""

    def __str__(self) -> str:
        return f"all groups wait for each other {_often(self.period)}{_late(self.late)}"


@dataclass(frozen=True)
class Quorum:
    """The number of groups that is enough: once so many wait, they wait at most `grace` s for the others."""

    groups: int
    grace: float
    late_rounds: int = 0
    """The number of synchronizations that a late group may miss so that its work still counts; 0: none."""


@dataclass(frozen=True)
class Living:
    """All groups that are alive wait for each other, or only for a `quorum`. The others may come back."""

    period: Period | None = None
    quorum: Quorum | None = None

    def __str__(self) -> str:
        waiting = f"all groups that are alive wait for each other {_often(self.period)}"
        if self.quorum is None:
            return waiting
        enough = count_text(self.quorum.groups, "group")
        return f"{waiting}, at most {self.quorum.grace:g} s as soon as {enough} wait"


@dataclass(frozen=True)
class InNeighbors:
    """A group waits for those that send to it in `graph`. It uses what they sent `late` steps before."""

    graph: Graph
    late: int = 0
    period: Period | None = None

    def __str__(self) -> str:
        return f"groups wait for their neighbors in {self.graph} {_often(self.period)}{_late(self.late)}"


@dataclass(frozen=True)
class Pairs:
    """Two groups wait for each other; the pairs are drawn at random each time.

    If the number of groups is odd, one group waits for none. Every `every` steps it is a different group.
    """

    seed: int
    every: int
    late: int = 0
    period: Period | None = None

    def partners(self, t: int, P: int) -> dict[int, int]:
        """Return the partner of each of P groups after step `t`, counted from 1; one group may have none."""
        alone = t // self.every % P
        groups = [g for g in range(P) if P % 2 == 0 or g != alone]
        random.Random(f"{self.seed} {t}").shuffle(groups)
        return {g: groups[i ^ 1] for i, g in enumerate(groups)}

    def __str__(self) -> str:
        return f"pairs of groups drawn by lot wait for each other {_often(self.period)}{_late(self.late)}"


@dataclass(frozen=True)
class Slowest:
    """A group waits until it is at most `staleness` requests ahead of the slowest; None: it never waits."""

    staleness: int | None
    period: Period | None = None

    def __str__(self) -> str:
        ahead = "and wait for no other group"
        if self.staleness is not None:
            what = "step" if self.period == 1 else "request"
            ahead = f"and are at most {count_text(self.staleness, what)} ahead of the slowest one"
        return f"groups ask a server {_often(self.period)} {ahead}"


@dataclass(frozen=True)
class RandomPartner:
    """Every second group sends a request to a random other one, and waits for the answer one step later."""

    seed: int
    period: Period | None = None

    def __str__(self) -> str:
        return f"every second group asks a random other one {_often(self.period)}"


@dataclass(frozen=True)
class Then:
    """Up to step `at` the groups wait as in `first`, and in later steps as in `then`.

    After step `at` itself, all groups wait for each other.
    """

    first: Waits
    then: Waits
    at: int | None
    """None: the step is not known in advance."""

    def __str__(self) -> str:
        until = "at first" if self.at is None else f"up to step {self.at}"
        return f"{until} {self.first}; then {self.then}"


@dataclass(frozen=True)
class Unknown:
    """No prediction of which groups wait for which is possible, for the reason `why`."""

    why: str

    def __str__(self) -> str:
        return "who waits for whom is not known"


Waits = All | Living | InNeighbors | Pairs | Slowest | RandomPartner | Then | Unknown


def least_groups(waits: Waits) -> int:
    """Return the smallest number of groups with which `waits` makes sense: its quorum, or 1."""
    quorum = waits.quorum if isinstance(waits, Living) else None
    return 1 if quorum is None else quorum.groups


def require_quorum(waits: Waits, groups: int) -> None:
    """Raise `UserError` if `waits` has a quorum of more than `groups`, the groups that there are."""
    quorum = least_groups(waits)
    if quorum > groups:
        why = f"quorum = {quorum}: expected at most the number of groups, {groups}"
        raise UserError(why, key="quorum", value=quorum)


def due(t: Any, period: Period) -> Any:
    """Return whether groups synchronize after step `t`, counted from 1, or after each step of an array."""
    per = Fraction(period)
    n, d = per.numerator, per.denominator
    return t * d // n > (t - 1) * d // n


def syncs_after(t: int, period: Period) -> int:
    """Return the number of synchronizations in the first `t` steps."""
    return math.floor(t / Fraction(period))


def step_of_sync(n: int, period: Period) -> int:
    """Return the step, counted from 1, after which the n-th synchronization comes; 0 for n = 0."""
    return math.ceil(n * Fraction(period))


def later(waits: Waits, steps: int) -> Waits:
    """Return `waits` for groups that train on and use each result `steps` steps later."""
    if isinstance(waits, All | InNeighbors | Pairs):
        return replace(waits, late=waits.late + steps)
    if isinstance(waits, Unknown):
        return waits
    return Unknown(f"it delays a method of which {waits}")


def in_turns(stages: Sequence[tuple[int | None, Waits]]) -> Waits:
    """Return which groups wait for which in consecutive `stages`, each given as (last step, waits)."""
    (until, waits), *later = stages
    return Then(waits, in_turns(later), until) if later else waits


def with_period(waits: Waits, period: Period | None) -> Waits:
    """Return `waits` for a method whose groups synchronize after every `period` steps on average."""
    return waits if isinstance(waits, Then | Unknown) else replace(waits, period=period)


def _often(period: Period | None) -> str:
    if period is None:
        return "after some steps"
    if period == 1:
        return "after every step"
    return f"after every {float(period):.4g} steps"


def _late(steps: int) -> str:
    return f" and use the result {count_text(steps, 'step')} later" if steps else ""
