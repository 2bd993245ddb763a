"""The one register that says which groups average which round, and the rules by which it changes.

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

Nothing here waits or talks: `coordinator` carries the events in and the register out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
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
    def deal(self) -> tuple[int, int]:
        return self.epoch, self.seen


NOWHERE = Point(epoch=-1)


@dataclass(frozen=True)
class Member:
    """An island in a generation: where its ranks listen, and the round whose mean it holds."""

    island: int
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
    dealt: Point = NOWHERE
    """Where the samples were dealt."""
    sharing: tuple[int, ...] = ()
    """The islands that they were dealt to."""
    units: tuple[tuple[int, int], ...] = ()
    """(island, x_i): what each has of ranks, threads or samples since the samples were dealt, if anybody
    allots them."""
    leaving: bool = False
    """All are to save and stop here: one of them has to, as its signals or its time limit say."""

    @property
    def islands(self) -> tuple[int, ...]:
        return tuple(member.island for member in self.members)

    @property
    def clients(self) -> set[tuple[int, int]]:
        """Of all members: (island, rank)."""
        return {(member.island, rank) for member in self.members for rank in range(member.ranks)}

    @property
    def counting(self) -> tuple[int, ...]:
        """The members whose parameters make the mean of the round that is due."""
        newest = max((member.rounds for member in self.members), default=0)
        first = self.rounds == self.began
        counting = [m.island for m in self.members if m.rounds == newest or not first]
        trained = [island for island in counting if island in self.sharing]
        return tuple(trained or counting)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Register:
        members = tuple(Member(m["island"], tuple(m["addresses"]), m["rounds"]) for m in saved["members"])
        places = {name: Point(**saved[name]) for name in ("place", "dealt")}
        rest = {
            **saved,
            "phase": Phase(saved["phase"]),
            "members": members,
            "sharing": tuple(saved["sharing"]),
            "units": tuple((island, x) for island, x in saved["units"]),
        }
        return cls(**{**rest, **places})


@dataclass(frozen=True)
class Ballot:
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
    pace: float = 0.0
    """Seconds that this rank computes for a step, 0 where that is not known."""
    leaving: bool = False
    """All are to stop after the round."""


@dataclass
class Candidate:
    """An island that wants to be in the next generation; complete when all its ranks have come."""

    ranks: int
    addresses: dict[int, str] = field(default_factory=dict)
    rounds: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return len(self.addresses) == self.ranks


class Membership:
    """The register with what moves it. Each method is an event; those of the past are ignored.

    `expected`: the islands that an open register waits for; at the start all that are to come.
    """

    def __init__(self, expected: frozenset[int], register: Register | None = None) -> None:
        self.register = register or Register()
        self.expected = expected
        self._candidates: dict[int, Candidate] = {}
        self._votes: dict[tuple[int, int], Ballot] = {}
        self._left_out: dict[int, int] = {}
        """Islands that may not come before so many rounds are committed."""
        self._times_left_out: Counter[int] = Counter()

    def come(self, island: int, rank: int, ranks: int, address: str, rounds: int) -> None:
        """A rank of `ranks` listens at `address`, holds the mean of `rounds`, and wants to average."""
        if self.register.phase is Phase.FINISHED:
            return
        candidate = self._candidates.setdefault(island, Candidate(ranks))
        candidate.addresses[rank] = address
        candidate.rounds.add(rounds)
        if not candidate.complete or island in self._left_out:
            return
        self.expected |= {island}
        if self.register.phase is Phase.RUN and island in self.register.islands:
            self._open()  # it was lost and is back before anybody noticed
        self._close_if_all_came()

    def vote(self, island: int, rank: int, generation: int, rounds: int, ballot: Ballot) -> None:
        """A rank of a member holds the whole mean of the round after `rounds`."""
        if not self._running(island, generation, rounds):
            return
        self._votes[island, rank] = ballot
        if self._votes.keys() != self.register.clients:
            return
        self._commit(rounds + 1)
        self._left_out = {i: until for i, until in self._left_out.items() if until > rounds + 1}
        if came := self._came():
            self.expected |= came
            self._open()

    def object(self, island: int, generation: int, rounds: int) -> None:
        """A rank of a member cannot finish the round after `rounds`."""
        if self._running(island, generation, rounds):
            self._open()

    def allot(self, units: Mapping[int, int]) -> None:
        """To be heard together with the commit that dealt samples."""
        self.register = replace(self.register, units=tuple(sorted(units.items())))

    def expect(self, island: int) -> None:
        """A member leaves to come back with other ranks: nobody goes on without it."""
        self._candidates.pop(island, None)
        if self.register.phase is Phase.RUN and island in self.register.islands:
            self._open()

    def lose(self, island: int) -> None:
        """It died, or has not been heard of for too long."""
        self._candidates.pop(island, None)
        self.expected -= {island}
        if self.register.phase is Phase.RUN and island in self.register.islands:
            self._open()
        self._close_if_all_came()

    def leave_out(self, island: int) -> None:
        """As `lose`, but it may be back at once, and would do the same harm: at first a round is made without
        it, then two, then four, …"""
        rounds = 2 ** self._times_left_out[island]
        self._left_out[island] = self.register.rounds + rounds
        self._times_left_out[island] += 1
        self.lose(island)

    def wait_no_longer(self) -> None:
        """Close an open register on those that have come, if any."""
        came = self._came()
        if not came:  # nobody is left to make those rounds
            self._left_out.clear()
            came = self._came()
        if self.register.phase is Phase.OPEN and came:
            self.expected = came
            self._close_if_all_came()

    def _came(self) -> frozenset[int]:
        """The islands that have come with all their ranks, and may."""
        came = {island for island, candidate in self._candidates.items() if candidate.complete}
        return frozenset(came - self._left_out.keys())

    def finish(self, island: int, generation: int) -> None:
        """A member has done all there was to do, and saved it."""
        if generation == self.register.generation and island in self.register.islands:
            self.register = replace(self.register, phase=Phase.FINISHED)

    def _commit(self, rounds: int) -> None:
        now = self.register
        places = {ballot.place for (island, _), ballot in self._votes.items() if island in now.counting}
        place = max(places, key=lambda place: (place.epoch, place.t))
        leaving = any(ballot.leaving for ballot in self._votes.values())
        self._votes.clear()
        self.register = replace(now, rounds=rounds, place=place, leaving=leaving)
        if place.deal != now.dealt.deal:
            self.register = replace(self.register, dealt=place, sharing=now.islands)

    def _running(self, island: int, generation: int, rounds: int) -> bool:
        now = self.register
        current = (now.phase, now.generation, now.rounds) == (Phase.RUN, generation, rounds)
        return current and island in now.islands

    def _open(self) -> None:
        self._votes.clear()
        self.register = replace(self.register, phase=Phase.OPEN)

    def _close_if_all_came(self) -> None:
        if self.register.phase is not Phase.OPEN or not self.expected:
            return
        if not all(i in self._candidates and self._candidates[i].complete for i in self.expected):
            return
        members = tuple(self._member(island) for island in sorted(self.expected))
        for island in self.expected:  # not of one that has half come
            del self._candidates[island]
        rounds = max(self.register.rounds, *(member.rounds for member in members))
        self.register = replace(
            self.register,
            generation=self.register.generation + 1,
            rounds=rounds,
            began=rounds,
            phase=Phase.RUN,
            members=members,
        )

    def _member(self, island: int) -> Member:
        candidate = self._candidates[island]
        addresses = tuple(address for _, address in sorted(candidate.addresses.items()))
        return Member(island, addresses, min(candidate.rounds))
