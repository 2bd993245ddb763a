"""The writer that reports changes of the coordinator's register to the event log."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from hpcsgd.elastic.event_log import EventLog, Loss
from hpcsgd.elastic.register import Phase, Register

log = logging.getLogger(__name__)


class MembershipLog:
    """A writer of membership changes to `events`, with the progress of the groups that are averaged.

    `late_rounds`: the number of rounds that a late group may miss for its work to count.
    """

    def __init__(self, events: EventLog, late_rounds: int = 0) -> None:
        self.events = events
        self._progress = 0.0
        """The largest progress, in epochs, that came with the votes for the current round."""
        self._late_rounds = late_rounds
        self._away: dict[int, tuple[int, str]] = {}
        """For each late group whose work may still count: the number of rounds whose mean it has, and why it
        was left out."""

    def hear(self, progress: float) -> None:
        """Record the `progress`, in epochs, that came with the vote of a rank in a group that counts."""
        self._progress = max(self._progress, progress)

    def lose(self, now: Register, replica_group: int, kind: Loss, why: str) -> None:
        """Log that a replica group of the register `now` is lost, or that it is late."""
        self._away.pop(replica_group, None)
        rounds = {member.replica_group: now.rounds_of(member) for member in now.members}.get(replica_group, 0)
        if kind is Loss.LATE and rounds and self._late_rounds:
            self._away[replica_group] = rounds, why
            self.events.late(replica_group=replica_group, why=why)
        else:
            self.events.lost(replica_group=replica_group, kind=kind, why=why)

    def note(self, before: Register, now: Register) -> None:
        """Log the changes from the register `before` to the register `now`."""
        if committed(before, now):
            epoch = int(self._progress)
            self.events.commit(
                generation=now.generation, rounds=now.rounds, members=now.replica_groups,
                counted=before.counting, t=now.place.t, epoch=epoch, fraction=self._progress - epoch,
            )  # fmt: skip
            self._progress = 0.0
            self._settle(before, now)
        if now.generation > before.generation:
            self._lose_all(self._away.keys() & set(now.replica_groups) - set(now.counting))
            log.info(
                "generation %d: replica groups %s", now.generation, ", ".join(map(str, now.replica_groups))
            )
            newcomers = [m.replica_group for m in now.members if m.rounds < now.rounds]
            self.events.generation(
                generation=now.generation, members=now.replica_groups, newcomers=newcomers, rounds=now.rounds
            )
        if now.phase is Phase.FINISHED:
            self._lose_all(self._away)
            self.events.finished()
        elif now.leaving and not before.leaving:
            self._lose_all(self._away)
            self.events.stopped()

    def _settle(self, before: Register, now: Register) -> None:
        """Forget late groups that the committed round has counted, and log those that are away too long."""
        for replica_group in self._away.keys() & set(before.counting):
            del self._away[replica_group]
        self._lose_all(
            replica_group
            for replica_group, (rounds, _) in self._away.items()
            if now.rounds - rounds > self._late_rounds
        )

    def _lose_all(self, replica_groups: Iterable[int]) -> None:
        for replica_group in sorted(replica_groups):
            _, why = self._away.pop(replica_group)
            self.events.lost(replica_group=replica_group, kind=Loss.LATE, why=why)


def committed(before: Register, now: Register) -> bool:
    """Return True if a round was committed between the registers `before` and `now`."""
    return now.rounds > before.rounds and now.generation == before.generation
