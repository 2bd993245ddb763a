"""The rules by which the register changes: which groups average, and when a round is committed.

Nothing here waits or communicates, so that tests can try every order of events. `register` explains the
terms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from hpcsgd.elastic.register import Member, Phase, Register, Vote


@dataclass
class Candidate:
    """A replica group that asks to join the next generation; complete once all its ranks have asked.

    `addresses` has the addresses at which ranks listen. `rounds` has the numbers of rounds whose mean they
    have. `brings` has True if they have trained since, and no round has counted that.
    """

    ranks: int
    addresses: dict[int, str] = field(default_factory=dict[int, str])
    rounds: set[int] = field(default_factory=set[int])
    brings: set[bool] = field(default_factory=set[bool])

    @property
    def complete(self) -> bool:
        return len(self.addresses) == self.ranks


class Membership:
    """The register, with a method for each event that changes it. Events of old rounds are ignored.

    `expected`: the replica groups that an open register waits for. At the start these are all groups, or none
    if the groups start separately. `together`: if one group has to stop, all stop; otherwise the others
    continue. `late_rounds`: the number of rounds that a group may miss for its work to count when it is back.
    """

    def __init__(
        self,
        expected: frozenset[int],
        register: Register | None = None,
        *,
        together: bool = True,
        late_rounds: int = 0,
    ) -> None:
        self.register = register or Register()
        self.expected = expected
        self._together, self._late_rounds = together, late_rounds
        self._candidates: dict[int, Candidate] = {}
        self._votes: dict[tuple[int, int], Vote] = {}
        self._left_out: dict[int, int] = {}
        """For each group that was left out, the number of committed rounds from which on it may return."""
        self._times_left_out: Counter[int] = Counter()
        self._moving: set[int] = set()
        """The members that have left to come back, without the mean that they had."""

    def come(
        self,
        replica_group: int,
        rank: int,
        ranks: int,
        address: str,
        rounds: int,
        *,
        brings: bool = False,
    ) -> None:
        """Record that rank `rank` of a group with `ranks` ranks asks to join.

        The rank listens at `address` and has the mean of the first `rounds` rounds. `brings`: it has trained
        since, and no round has counted that.
        """
        if self.register.phase is Phase.FINISHED:
            return
        candidate = self._candidates.setdefault(replica_group, Candidate(ranks))
        candidate.addresses[rank] = address
        candidate.rounds.add(rounds)
        candidate.brings.add(brings)
        if not candidate.complete or replica_group in self._left_out:
            return
        self.expected |= {replica_group}
        if self.register.phase is Phase.RUN and replica_group in self.register.replica_groups:
            self._open()  # the group died and is back before its death was noticed
        self._close_if_all_came()

    def vote(self, replica_group: int, rank: int, generation: int, rounds: int, ballot: Vote) -> None:
        """Record the vote of a rank that has the whole mean; commit the round if all ranks have voted.

        The round is the one after `rounds` committed rounds.
        """
        if not self._running(replica_group, generation, rounds):
            return
        self._votes[replica_group, rank] = ballot
        if self._votes.keys() != self.register.clients:
            return
        self._commit(rounds + 1)
        self._left_out = {i: until for i, until in self._left_out.items() if until > rounds + 1}
        if came := self._came():
            self.expected |= came
            self._open()

    def object(self, replica_group: int, generation: int, rounds: int) -> None:
        """Abort the round after `rounds` committed rounds, because a rank of a member cannot finish it."""
        if self._running(replica_group, generation, rounds):
            self._open()

    def allot(self, units: Mapping[int, int]) -> None:
        """Record how many units of the resource each group has from now on; see `rebalancing`.

        This must happen before the register with the commit that assigned samples is sent.
        """
        self.register = replace(self.register, units=tuple(sorted(units.items())))

    def expect(self, replica_group: int) -> None:
        """Open the register for a member that leaves to come back with more or fewer ranks."""
        self._candidates.pop(replica_group, None)
        self._moving.add(replica_group)
        if self.register.phase is Phase.RUN and replica_group in self.register.replica_groups:
            self._open()

    def lose(self, replica_group: int) -> None:
        """Remove a replica group that died or has been silent for too long."""
        self._candidates.pop(replica_group, None)
        self.expected -= {replica_group}
        if self.register.phase is Phase.RUN and replica_group in self.register.replica_groups:
            self._open()
        self._close_if_all_came()

    def leave_out(self, replica_group: int) -> None:
        """Remove a replica group like `lose`, and keep it out for some rounds, in which it would fail again.

        It misses one round at first, then two, then four, …
        """
        rounds = 2 ** self._times_left_out[replica_group]
        self._left_out[replica_group] = self.register.rounds + rounds
        self._times_left_out[replica_group] += 1
        self.lose(replica_group)

    def ready(self) -> frozenset[int]:
        """Return the groups that have asked to join, and whose parameters count if the register closes.

        There are none if a group that still trains has a newer mean, or is the only one with samples. Without
        that group its work would be lost, and the others would go back.
        """
        held = {
            member.replica_group: self.register.rounds_of(member)
            for member in self.register.members
            if member.replica_group in self.expected - self._moving
        }
        held |= {i: min(candidate.rounds) for i, candidate in self._candidates.items()}
        most = max(held.values(), default=0)
        newest = {i for i, rounds in held.items() if rounds == most}
        came = self._came() or self._complete()
        return came & (newest & set(self.register.sharing) or newest)

    def lesser(self, replica_groups: Iterable[int]) -> int:
        """Return the group that has missed most rounds; of several the one of highest number."""
        held = {member.replica_group: self.register.rounds_of(member) for member in self.register.members}
        return min(replica_groups, key=lambda replica_group: (held.get(replica_group, 0), -replica_group))

    def wait_no_longer(self) -> None:
        """Close an open register with the groups that have asked to join, if some of them are `ready`."""
        if self.register.phase is not Phase.OPEN or not self.ready():
            return
        if not self._came():  # no other group is left to make the rounds for which they are left out
            self._left_out.clear()
        self.expected = self._came()
        self._close_if_all_came()

    def _complete(self) -> frozenset[int]:
        return frozenset(i for i, candidate in self._candidates.items() if candidate.complete)

    def _came(self) -> frozenset[int]:
        """Return the groups of which all ranks have asked to join, without those that are left out."""
        return self._complete() - self._left_out.keys()

    def finish(self, replica_group: int, generation: int) -> None:
        """End the training in the register, because a member has completed and saved it."""
        if generation == self.register.generation and replica_group in self.register.replica_groups:
            self.register = replace(self.register, phase=Phase.FINISHED)

    def _commit(self, rounds: int) -> None:
        now = self.register
        places = {
            ballot.place
            for (replica_group, _), ballot in self._votes.items()
            if replica_group in now.up_to_date
        }
        place = max(places, key=lambda place: (place.epoch, place.t))
        stopping = {replica_group for (replica_group, _), ballot in self._votes.items() if ballot.leaving}
        leaving = bool(stopping) and self._together
        going = () if self._together else tuple(sorted(stopping))
        self._votes.clear()
        self.register = replace(now, rounds=rounds, place=place, leaving=leaving, going=going)
        are_left = not set(now.sharing).isdisjoint(now.replica_groups)
        if place.as_assigned != now.assigned_at.as_assigned or not are_left:  # else nobody would train
            staying = tuple(
                replica_group for replica_group in now.replica_groups if replica_group not in going
            )
            self.register = replace(self.register, assigned_at=place, sharing=staying or now.replica_groups)

    def _running(self, replica_group: int, generation: int, rounds: int) -> bool:
        now = self.register
        current = (now.phase, now.generation, now.rounds) == (Phase.RUN, generation, rounds)
        return current and replica_group in now.replica_groups

    def _open(self) -> None:
        self._votes.clear()
        self.register = replace(self.register, phase=Phase.OPEN)

    def _close_if_all_came(self) -> None:
        if self.register.phase is not Phase.OPEN or not self.expected:
            return
        if not all(i in self._candidates and self._candidates[i].complete for i in self.expected):
            return
        newest = max(min(self._candidates[replica_group].rounds) for replica_group in self.expected)
        members = tuple(self._member(replica_group, newest) for replica_group in sorted(self.expected))
        for replica_group in self.expected:  # keep groups of which only some ranks have asked
            del self._candidates[replica_group]
        self._moving.clear()
        rounds = max(self.register.rounds, *(member.rounds for member in members))
        self.register = replace(
            self.register,
            generation=self.register.generation + 1,
            rounds=rounds,
            began=rounds,
            phase=Phase.RUN,
            members=members,
        )

    def _member(self, replica_group: int, newest: int) -> Member:
        """Return the member that a candidate becomes, where others have the mean of `newest` rounds."""
        candidate = self._candidates[replica_group]
        addresses = tuple(address for _, address in sorted(candidate.addresses.items()))
        rounds = min(candidate.rounds)
        late = all(candidate.brings) and 0 < newest - rounds <= self._late_rounds
        return Member(replica_group, addresses, rounds, late)
