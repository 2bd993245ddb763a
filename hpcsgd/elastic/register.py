"""The register: the record of which replica groups average in which round.

Each elastic group is a separate MPI job. The register decides which groups connect and average; it replaces
the parameter server of EnsembleSync, section 3.2. Every rank of a group is a client of the coordinator, which
keeps the register. A generation is the time in which the same groups, its members, average. After r committed
rounds, generation g is in the state (g, r). The next round ends in one of two ways, the same for all ranks:

    commit   every client of every member has voted: all of them have the whole mean       (g, r) → (g, r+1)
    abort    a member was lost or a client could not finish: no rank uses the mean         (g, r) → open

An open register waits until every group that is not lost has asked to join. Then it closes: these groups are
the members of generation g+1, whose r is the largest number of rounds that a member has. The parameters of
groups that missed rounds, or join for the first time, do not count in the first round. A late group is an
exception: what it learned before the others left it out counts, if it missed only a few rounds.

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
from functools import cached_property
from typing import Any


class Phase(StrEnum):
    """The phases of a register."""

    OPEN = "open"
    """The register waits for groups that ask to join."""
    RUN = "run"
    """The members of a generation average."""
    FINISHED = "finished"
    """The training is done and saved."""


@dataclass(frozen=True)
class Point:
    """The position of a training: `t` updates done, in epoch number `epoch`.

    Samples were last assigned to groups at the position `seen` of this epoch, as in `Sampler.position`.
    """

    t: int = 0
    epoch: int = 0
    seen: int = 0

    @property
    def as_assigned(self) -> tuple[int, int]:
        return self.epoch, self.seen


NOWHERE = Point(epoch=-1)
"""The position before the training has begun."""


@dataclass(frozen=True)
class Member:
    """A replica group that averages in a generation: its ranks and their addresses."""

    replica_group: int
    addresses: tuple[str, ...]
    """The address (host:port) at which each rank of the group listens."""
    rounds: int
    """The number of committed rounds whose mean the group had when the generation began."""
    late: bool = False
    """True if the group counts in the first round, although it has missed rounds."""

    @property
    def ranks(self) -> int:
        return len(self.addresses)


@dataclass(frozen=True)
class Register:
    """The state that all replica groups and coordinators share; see the module docstring."""

    generation: int = 0
    rounds: int = 0
    """The number of committed rounds."""
    began: int = 0
    """The number of rounds that were committed before this generation began."""
    phase: Phase = Phase.OPEN
    members: tuple[Member, ...] = ()
    """The members of this generation (of the last one while the register is open), by ascending number."""
    place: Point = NOWHERE
    """The training's position at the last commit."""
    assigned_at: Point = NOWHERE
    """The training's position at which samples were last assigned."""
    sharing: tuple[int, ...] = ()
    """The replica groups to which samples were last assigned."""
    units: tuple[tuple[int, int], ...] = ()
    """(replica group, x_i) for each group: x_i is its number of ranks, threads or samples.

    Empty if nothing is rebalanced.
    """
    leaving: bool = False
    """True if all groups save and stop here, because one got a signal or is near its time limit."""
    going: tuple[int, ...] = ()
    """Separately started replica groups that have to stop; the others continue without them."""

    @cached_property
    def replica_groups(self) -> tuple[int, ...]:
        return tuple(member.replica_group for member in self.members)

    @cached_property
    def clients(self) -> frozenset[tuple[int, int]]:
        """The clients of all members, as (replica group, rank)."""
        return frozenset(
            (member.replica_group, rank) for member in self.members for rank in range(member.ranks)
        )

    def neighbour(self, replica_group: int, side: int) -> int:
        """Return the next member to the left (`side` -1) or right (1) of `replica_group` in the ring."""
        return self.replica_groups[(self.replica_groups.index(replica_group) + side) % len(self.members)]

    def stops(self, replica_group: int) -> bool:
        """Return True if `replica_group` has to save and stop after the last committed round."""
        return self.leaving or replica_group in self.going

    def grants(self, replica_group: int, last: int) -> bool:
        """Return whether `replica_group` is a member of a running generation whose number is above `last`.

        Then a request to join is already granted: a client asks again when a generation begins without its
        group, and this second request must not end a generation that began with the group meanwhile.
        """
        return self.phase is Phase.RUN and replica_group in self.replica_groups and last < self.generation

    @cached_property
    def counting(self) -> tuple[int, ...]:
        """The members whose parameters are averaged in the current round."""
        counting = {*self.up_to_date, *self.late}
        return tuple(replica_group for replica_group in self.replica_groups if replica_group in counting)

    @cached_property
    def up_to_date(self) -> tuple[int, ...]:
        """The members in `counting` that have missed no round.

        All others continue at their position, and get the outer state of one of them.
        """
        newest = max((member.rounds for member in self.members), default=0)
        here = [m.replica_group for m in self.members if m.rounds == newest or not self.is_first]
        sharing = set(self.sharing)
        trained = [replica_group for replica_group in here if replica_group in sharing]
        return tuple(trained or here)

    @cached_property
    def late(self) -> tuple[int, ...]:
        """The members in `counting` that have missed rounds."""
        return tuple(m.replica_group for m in self.members if m.late and self.is_first)

    @property
    def is_first(self) -> bool:
        """True if the current round is the first one of this generation."""
        return self.rounds == self.began

    @property
    def catches_up(self) -> bool:
        """True if members have missed rounds, or have not averaged yet: then all get the state of one."""
        rounds = {member.rounds for member in self.members}
        return self.is_first and (len(rounds) > 1 or rounds == {0})

    def rounds_of(self, member: Member) -> int:
        """Return the number of committed rounds whose mean `member` has now."""
        return member.rounds if self.is_first else self.rounds

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Register:
        members = tuple(
            Member(m["replica_group"], tuple(m["addresses"]), m["rounds"], m["late"])
            for m in saved["members"]
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
    """A rank's vote to commit a round."""

    place: Point = Point()
    """The training's position if the round is committed."""
    leaving: bool = False
    """True if the rank's group has to stop after the round."""


@dataclass(frozen=True)
class Report:
    """The facts about the training that a rank reports when it averages."""

    deal: tuple[int, int] = (0, 0)
    """(epoch, seen) of the training's position after the round, as in `Point`."""
    progress: float = 0.0
    """The training's progress in epochs, for the event log."""
    step_seconds: float = 0.0
    """Seconds that this rank computes per step, 0 if unknown."""
    leaving: bool = False
    """True if this replica group has to stop after the round, with all groups that were started with it."""
    saving: bool = False
    """True if groups evaluate or save the model after the round, so that all parts of it must be averaged."""
