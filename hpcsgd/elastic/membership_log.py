"""What the event log is told of a register that has changed."""

from __future__ import annotations

import logging

from hpcsgd.elastic.event_log import EventLog
from hpcsgd.elastic.register import Phase, Register

log = logging.getLogger(__name__)


class MembershipLog:
    """Keeps `events`, with how far the training is, as those say that count in a round."""

    def __init__(self, events: EventLog) -> None:
        self.events = events
        self._progress = 0.0
        """In epochs, as said with the votes for the round that is due."""

    def hear(self, progress: float) -> None:
        """A rank that counts in the round has come so far, in epochs."""
        self._progress = max(self._progress, progress)

    def note(self, before: Register, now: Register) -> None:
        """What has become of the register."""
        if committed(before, now):
            epoch = int(self._progress)
            self.events.commit(
                generation=now.generation, rounds=now.rounds, members=now.replica_groups,
                counted=before.counting, t=now.place.t, epoch=epoch, fraction=self._progress - epoch,
            )  # fmt: skip
            self._progress = 0.0
        if now.generation > before.generation:
            log.info("generation %d: islands %s", now.generation, ", ".join(map(str, now.replica_groups)))
            newcomers = [m.replica_group for m in now.members if m.rounds < now.rounds]
            self.events.generation(
                generation=now.generation, members=now.replica_groups, newcomers=newcomers, rounds=now.rounds
            )
        if now.phase is Phase.FINISHED:
            self.events.finished()
        elif now.leaving and not before.leaving:
            self.events.stopped()


def committed(before: Register, now: Register) -> bool:
    """Whether a round was, between the two."""
    return now.rounds > before.rounds and now.generation == before.generation
