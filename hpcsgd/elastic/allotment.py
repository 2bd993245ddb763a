"""What is reallocated, and how much there is: ranks of a group, threads of a rank, samples of a pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from hpcsgd.elastic.reallocation import Reallocation
from hpcsgd.elastic.register import Register


@dataclass(frozen=True)
class Allotment:
    """`unit`: "ranks", "threads" or "samples"; `total`: X of them, for the islands that are alive.

    Ranks of the dead are gone with their node, and those that a group has are told by the register, so for
    them X is what the living have. `cost`: seconds that a move takes; `epochs`: of the whole training.
    """

    unit: str
    total: int
    margin: float
    cost: float
    epochs: int

    def units(self, now: Register, seconds: Mapping[int, float]) -> dict[int, int] | None:
        """Of each member, where samples have just been dealt; None where nothing moves. `seconds`: what each
        computed in the last epoch."""
        given = dict(now.units)
        if self.unit == "ranks":
            given = {member.island: member.ranks for member in now.members}
        units = {island: given.get(island, 0) for island in now.islands}
        total = sum(units.values()) if self.unit == "ranks" else self.total
        ahead = max(self.epochs - now.place.epoch, 0)
        return Reallocation(total, self.margin).propose(seconds, units, self.cost, ahead)


class Paces:
    """Seconds that a step of each island takes since samples were dealt, on its slowest rank."""

    def __init__(self) -> None:
        self._pace: defaultdict[int, float] = defaultdict(float)

    def hear(self, island: int, pace: float) -> None:
        """One of its ranks says so, or 0 where it does not know."""
        self._pace[island] = max(self._pace[island], pace)

    def seconds(self, steps: int) -> dict[int, float]:
        """What each computed in so many steps, of those that know; then they are forgotten."""
        seconds = {island: pace * steps for island, pace in self._pace.items() if pace and steps}
        self._pace.clear()
        return seconds
