"""The register: the one record of which replica groups average in which round.

Each elastic group is an MPI job of its own. The register decides which groups connect and average; it
replaces the parameter server of EnsembleSync, section 3.2. Every rank of a group is a client of the
coordinator, which keeps the register. Round r + 1 of generation g ends in one of two ways, the same for all:

    commit   every client of every member has voted: all of them have the whole mean       (g, r) → (g, r+1)
    abort    a member was lost or a client could not finish: no rank uses the mean         (g, r) → open

An open register waits until every group that is not lost has asked to join. Then it closes: these groups are
the members of generation g+1, which starts at the largest round among them. The parameters of groups that
missed rounds, or join for the first time, do not count in the first round.

The register also has the position of the training, for groups that return. An epoch's samples are assigned to
the members of the round at which the epoch began. A group that joins later has no samples, and does not
count, until samples are assigned again.

`membership` has the rules by which the register changes; `coordinator` receives the events and sends the
register.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    OPEN = "open"
    RUN = "run"
    FINISHED = "finished"


@dataclass(frozen=True)
class Point:
    """The position of a training: `t` updates done, in `epoch`.

    The epoch's remaining samples were assigned last when all replica groups together had used `seen` of them.
    """

    t: int = 0
    epoch: int = 0
    seen: int = 0

    @property
    def as_assigned(self) -> tuple[int, int]:
        return self.epoch, self.seen


NOWHERE = Point(epoch=-1)


@dataclass(frozen=True)
class Member:
    """A replica group in a generation: where its ranks listen, and the round whose mean it holds."""

    replica_group: int
    addresses: tuple[str, ...]
    rounds: int

    @property
    def ranks(self) -> int:
        return len(self.addresses)


@dataclass(frozen=True)
class Register:
    """The state that all replica groups and coordinators share."""

    generation: int = 0
    rounds: int = 0
    """The number of committed rounds."""
    began: int = 0
    """The number of committed rounds before this generation."""
    phase: Phase = Phase.OPEN
    members: tuple[Member, ...] = ()
    """The members of this generation (of the last one while the register is open), by ascending number."""
    place: Point = NOWHERE
    """The position at the last commit."""
    assigned_at: Point = NOWHERE
    """The position at which samples were assigned last."""
    sharing: tuple[int, ...] = ()
    """The replica groups to which samples were assigned last."""
    units: tuple[tuple[int, int], ...] = ()
    """(replica group, x_i): how many ranks, threads or samples each has; empty without rebalancing."""
    leaving: bool = False
    """True if all groups save and stop here, because one has to stop after a signal or at its time limit."""
    going: tuple[int, ...] = ()
    """Separately started replica groups that have to stop; the others continue without them."""

    @property
    def replica_groups(self) -> tuple[int, ...]:
        return tuple(member.replica_group for member in self.members)

    @property
    def clients(self) -> set[tuple[int, int]]:
        """The clients of all members, as (replica group, rank)."""
        return {(member.replica_group, rank) for member in self.members for rank in range(member.ranks)}

    def stops(self, replica_group: int) -> bool:
        """Return True if the replica group has to stop here."""
        return self.leaving or replica_group in self.going

    def grants(self, replica_group: int, last: int) -> bool:
        """Return whether `replica_group` is in a running generation that began after generation `last`.

        A client asks again to join when a generation begins without it. If its first request was granted
        meanwhile, the second request must not end the new generation.
        """
        return self.phase is Phase.RUN and replica_group in self.replica_groups and last < self.generation

    @property
    def counting(self) -> tuple[int, ...]:
        """The members whose parameters are averaged in the current round."""
        newest = max((member.rounds for member in self.members), default=0)
        first = self.rounds == self.began
        counting = [m.replica_group for m in self.members if m.rounds == newest or not first]
        trained = [replica_group for replica_group in counting if replica_group in self.sharing]
        return tuple(trained or counting)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Register:
        members = tuple(
            Member(m["replica_group"], tuple(m["addresses"]), m["rounds"]) for m in saved["members"]
        )
        places: dict[str, Any] = {name: Point(**saved[name]) for name in ("place", "assigned_at")}
        rest: dict[str, Any] = {
            **saved,
            "phase": Phase(saved["phase"]),
            "members": members,
            "sharing": tuple(saved["sharing"]),
            "going": tuple(saved.get("going", ())),
            "units": tuple((replica_group, x) for replica_group, x in saved["units"]),
        }
        return cls(**{**rest, **places})


@dataclass(frozen=True)
class Vote:
    """A rank's vote: the position if the round is committed, and whether its group has to leave."""

    place: Point = Point()
    leaving: bool = False


@dataclass(frozen=True)
class Report:
    """What a rank reports about the training when it averages."""

    deal: tuple[int, int] = (0, 0)
    """(epoch, seen) of the training's position after the round, as in `Point`."""
    progress: float = 0.0
    """The progress in epochs, for the event log."""
    step_seconds: float = 0.0
    """Seconds that this rank computes per step, 0 if unknown."""
    leaving: bool = False
    """True if this replica group has to stop after the round, with all groups that were started with it."""
