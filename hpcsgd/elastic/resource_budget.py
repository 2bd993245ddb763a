"""The resource that rebalancing moves between groups (ranks, threads or samples), and its amount."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from hpcsgd.elastic.rebalancing import Rebalancing
from hpcsgd.elastic.register import Register


@dataclass(frozen=True)
class ResourceBudget:
    """The resource that rebalancing moves between groups, and the amount of it.

    `resource`: "ranks", "threads" or "samples". `total`: the number X of units for all living replica groups.
    For ranks `total` is ignored: X is then the number of ranks of the living groups, because the ranks of a
    lost group are gone with their nodes. `min_gain`: see `Rebalancing`. `cost`: seconds that a move takes.
    `epochs`: the number of epochs of the whole training.
    """

    resource: str
    total: int
    min_gain: float
    cost: float
    epochs: int

    def units(self, now: Register, seconds: Mapping[int, float]) -> dict[int, int] | None:
        """Return the units (ranks, threads or samples) of each group from now on, or None if none move.

        `now`: the coordinator's register after samples have been assigned. `seconds`: the seconds that each
        group computed in the last epoch.
        """
        given = dict(now.units)
        if self.resource == "ranks":
            given = {member.replica_group: member.ranks for member in now.members}
        units = {replica_group: given.get(replica_group, 0) for replica_group in now.replica_groups}
        total = sum(units.values()) if self.resource == "ranks" else self.total
        ahead = max(self.epochs - now.place.epoch, 0)
        return Rebalancing(total, self.min_gain).propose(seconds, units, self.cost, ahead)


class StepTimes:
    """The seconds per step of each replica group's slowest rank, since samples were last assigned."""

    def __init__(self) -> None:
        self._pace: defaultdict[int, float] = defaultdict(float)

    def add(self, replica_group: int, pace: float) -> None:
        """Record the seconds per step that one rank of the group reports; 0 if unknown."""
        self._pace[replica_group] = max(self._pace[replica_group], pace)

    def seconds(self, steps: int) -> dict[int, float]:
        """Return the seconds that each group computed in `steps` steps, and clear the records.

        Groups that have not reported their seconds per step are left out.
        """
        seconds = {
            replica_group: pace * steps for replica_group, pace in self._pace.items() if pace and steps
        }
        self._pace.clear()
        return seconds
