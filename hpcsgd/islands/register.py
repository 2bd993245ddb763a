"""The one register that says which groups average which round, and the rules by which it changes.

Groups that may die are islands: each is an MPI job of its own, and they meet through links that a register of
members decides on (EnsembleSync, section 3.2, whose parameter server this replaces). Every rank of an island
has a seat. A round ends in one of two ways, for all alike:

    commit   every seat of every member has voted: all of them hold the whole mean       (g, r) → (g, r+1)
    abort    a member was lost or a seat could not finish: nobody applies anything       (g, r) → open

An open register waits until every island that is not lost has come, then closes on
those that are there: generation g+1, at the largest round among them. Islands that come from further back, or
for the first time, are members whose parameters do not count in the first round.

Nothing here waits or talks: `coordinator` carries the events in and the register out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    OPEN = "open"
    RUN = "run"
    FINISHED = "finished"


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
    phase: Phase = Phase.OPEN
    members: tuple[Member, ...] = ()
    """Of this generation, or of the last one while the register is open; by island."""

    @property
    def islands(self) -> tuple[int, ...]:
        return tuple(member.island for member in self.members)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Register:
        members = tuple(Member(m["island"], tuple(m["addresses"]), m["rounds"]) for m in saved["members"])
        return cls(saved["generation"], saved["rounds"], Phase(saved["phase"]), members)


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
        self._votes: set[tuple[int, int]] = set()

    def come(self, island: int, rank: int, ranks: int, address: str, rounds: int) -> None:
        """A rank of `ranks` listens at `address`, holds the mean of `rounds`, and wants to average."""
        if self.register.phase is Phase.FINISHED:
            return
        candidate = self._candidates.setdefault(island, Candidate(ranks))
        candidate.addresses[rank] = address
        candidate.rounds.add(rounds)
        if not candidate.complete:
            return
        self.expected |= {island}
        if self.register.phase is Phase.RUN and island in self.register.islands:
            self._open()  # it was lost and is back before anybody noticed
        self._close_if_all_came()

    def vote(self, island: int, rank: int, generation: int, rounds: int) -> None:
        """A rank of a member holds the whole mean of the round after `rounds`."""
        if not self._running(island, generation, rounds):
            return
        self._votes.add((island, rank))
        if len(self._votes) < sum(member.ranks for member in self.register.members):
            return
        self._votes.clear()
        self.register = replace(self.register, rounds=rounds + 1)
        if any(candidate.complete for candidate in self._candidates.values()):
            self._open()

    def object(self, island: int, generation: int, rounds: int) -> None:
        """A rank of a member cannot finish the round after `rounds`."""
        if self._running(island, generation, rounds):
            self._open()

    def lose(self, island: int) -> None:
        """It died, or has not been heard of for too long."""
        self._candidates.pop(island, None)
        self.expected -= {island}
        if self.register.phase is Phase.RUN and island in self.register.islands:
            self._open()
        self._close_if_all_came()

    def wait_no_longer(self) -> None:
        """Close an open register on those that have come, if any."""
        came = {island for island, candidate in self._candidates.items() if candidate.complete}
        if self.register.phase is Phase.OPEN and came:
            self.expected = frozenset(came)
            self._close_if_all_came()

    def finish(self, island: int, generation: int) -> None:
        """A member has done all there was to do, and saved it."""
        if generation == self.register.generation and island in self.register.islands:
            self.register = replace(self.register, phase=Phase.FINISHED)

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
        self._candidates.clear()
        self.register = Register(
            generation=self.register.generation + 1,
            rounds=max(self.register.rounds, *(member.rounds for member in members)),
            phase=Phase.RUN,
            members=members,
        )

    def _member(self, island: int) -> Member:
        candidate = self._candidates[island]
        addresses = tuple(address for _, address in sorted(candidate.addresses.items()))
        return Member(island, addresses, min(candidate.rounds))
