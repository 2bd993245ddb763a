"""The writer that reports changes of the register to the event log."""

from __future__ import annotations

import logging

from hpcsgd.elastic.event_log import EventLog
from hpcsgd.elastic.register import Phase, Register

log = logging.getLogger(__name__)


class MembershipLog:
    """A writer of membership changes to `events`, with the progress of the groups that are averaged."""

    def __init__(self, events: EventLog) -> None:
        self.events = events
        self._progress = 0.0
        """The largest progress, in epochs, that came with the votes for the current round."""

    def hear(self, progress: float) -> None:
        """Record the progress, in epochs, of a rank whose model counts in the round."""
        self._progress = max(self._progress, progress)

    def note(self, before: Register, now: Register) -> None:
        """Log the changes from the register `before` to the register `now`."""
        if committed(before, now):
            epoch = int(self._progress)
            self.events.commit(
                generation=now.generation, rounds=now.rounds, members=now.replica_groups,
                counted=before.counting, t=now.place.t, epoch=epoch, fraction=self._progress - epoch,
            )  # fmt: skip
            self._progress = 0.0
        if now.generation > before.generation:
            log.info(
                "generation %d: replica groups %s", now.generation, ", ".join(map(str, now.replica_groups))
            )
            newcomers = [m.replica_group for m in now.members if m.rounds < now.rounds]
            self.events.generation(
                generation=now.generation, members=now.replica_groups, newcomers=newcomers, rounds=now.rounds
            )
        if now.phase is Phase.FINISHED:
            self.events.finished()
        elif now.leaving and not before.leaving:
            self.events.stopped()


def committed(before: Register, now: Register) -> bool:
    """Return True if a round was committed between the registers `before` and `now`."""
    return now.rounds > before.rounds and now.generation == before.generation
