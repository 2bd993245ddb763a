"""The one register that says which groups average which round.

Groups that may die are islands: each is an MPI job of its own, and they meet through links that a register of
members decides on (EnsembleSync, section 3.2, whose parameter server this replaces). Every rank of an island
is a client. A round ends in one of two ways, for all alike:

    commit   every client of every member has voted: all of them hold the whole mean       (g, r) → (g, r+1)
    abort    a member was lost or a client could not finish: nobody applies anything       (g, r) → open

An open register waits until every island that is not lost has come, then closes on
those that are there: generation g+1, at the largest round among them. Islands that come from further back, or
for the first time, are members whose parameters do not count in the first round.

The register also says where the training is, so that whoever returns finds its place. An epoch's samples are
dealt to the members of the round that began it; who joins later looks on, and does not count, until they are
dealt again.

`membership` has the rules by which it changes, `coordinator` carries the events in and the register out.
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
    """Where a training is: `t` updates done, in `epoch`, whose samples were dealt when `seen` of them, over
    all islands, were used up."""

    t: int = 0
    epoch: int = 0
    seen: int = 0

    @property
    def as_assigned(self) -> tuple[int, int]:
        return self.epoch, self.seen


NOWHERE = Point(epoch=-1)


@dataclass(frozen=True)
class Member:
    """An island in a generation: where its ranks listen, and the round whose mean it holds."""

    replica_group: int
    addresses: tuple[str, ...]
    rounds: int

    @property
    def ranks(self) -> int:
        return len(self.addresses)


@dataclass(frozen=True)
class Register:
    """What all go by."""

    generation: int = 0
    rounds: int = 0
    """Rounds committed."""
    began: int = 0
    """Of them, before this generation."""
    phase: Phase = Phase.OPEN
    members: tuple[Member, ...] = ()
    """Of this generation, or of the last one while the register is open; by island."""
    place: Point = NOWHERE
    """As of the last commit."""
    assigned_at: Point = NOWHERE
    """Where the samples were dealt."""
    sharing: tuple[int, ...] = ()
    """The islands that they were dealt to."""
    units: tuple[tuple[int, int], ...] = ()
    """(island, x_i): what each has of ranks, threads or samples since the samples were dealt, if anybody
    allots them."""
    leaving: bool = False
    """All are to save and stop here: one of them has to, as its signals or its time limit say."""
    going: tuple[int, ...] = ()
    """Islands that have to stop, of those that were started apart: the others go on without them."""

    @property
    def replica_groups(self) -> tuple[int, ...]:
        return tuple(member.replica_group for member in self.members)

    @property
    def clients(self) -> set[tuple[int, int]]:
        """Of all members: (island, rank)."""
        return {(member.replica_group, rank) for member in self.members for rank in range(member.ranks)}

    def stops(self, replica_group: int) -> bool:
        """Whether that island is to end here."""
        return self.leaving or replica_group in self.going

    def grants(self, replica_group: int, last: int) -> bool:
        """Return whether `replica_group` is a member of a running generation that began after the generation
        `last`.

        A client asks again when a generation begins without it. If its first request is granted meanwhile,
        the second one must not end the new generation.
        """
        return self.phase is Phase.RUN and replica_group in self.replica_groups and last < self.generation

    @property
    def counting(self) -> tuple[int, ...]:
        """The members whose parameters make the mean of the round that is due."""
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
    """What a rank says with its vote: where it is if the round is committed, and whether it has to leave."""

    place: Point = Point()
    leaving: bool = False


@dataclass(frozen=True)
class Report:
    """What a rank has to say of the training with a round."""

    deal: tuple[int, int] = (0, 0)
    """The epoch that begins or goes on with the round, and how many of its samples had been seen by all
    islands when they were dealt."""
    progress: float = 0.0
    """In epochs, for the picture."""
    step_seconds: float = 0.0
    """Seconds that this rank computes for a step, 0 where that is not known."""
    leaving: bool = False
    """This island has to stop after the round, and so do all that were started with it."""
