"""Late work: what a replica group learned while the others went on without it, and whether it still counts.

A late group brings its work to the round in which it returns. There the group gets the newest θ of the
others, and adds θ − (θ_base − w) to the mean: w is its model, and θ_base the one from which it trained. So
the round counts exactly what the group learned. The coordinator decides whether the group has missed too many
rounds.

If rounds average one part of the model after the other, the group loses only what it learned in the parts
that the others have averaged without it. What still counts does so in the next rounds of these parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from hpcsgd.elastic.attempt import Outcome
from hpcsgd.elastic.contribution import Contribution
from hpcsgd.elastic.register import Register
from hpcsgd.errors import count_text

log = logging.getLogger(__name__)

OF_EACH_PART = "the last synchronization of each part"
IN_PARTS = "in the parts of the model that the others synchronized without it"


class LateWork:
    """What the replica group `index` learned since its last committed round; each rank has one.

    If the group is left out, rank 0 logs whether the work counts or is lost.
    """

    def __init__(self, index: int, rank: int) -> None:
        self._index, self._logs = index, rank == 0
        self._rounds, self._late_rounds = 0, 0
        """The number of committed rounds whose mean this group has, and how many it may miss; 0 if it has
        nothing to bring."""
        self._has_parts = False
        """True if the model has several parts, which rounds average one after the other."""
        self._may_have_counted = False
        """True if the others may have committed a round in which this group has voted."""
        self._announced = False
        """True if the log says that the work may count later, but does not say yet whether it has counted."""

    def begin(self, contribution: Contribution | None, rounds: int) -> None:
        """Begin to average `contribution` of a group whose last committed round is number `rounds`."""
        learned = contribution is not None and any(contribution.norms) and rounds > 0
        self._late_rounds = contribution.late_rounds if contribution is not None and learned else 0
        self._has_parts = contribution is not None and len(contribution.norms) > 1
        self._rounds = rounds

    @property
    def may_count(self) -> bool:
        """True if the group has learned something that may count in a later round, too."""
        return self._late_rounds > 0 and not self._may_have_counted

    def failed(self, outcomes: Iterable[Outcome]) -> None:
        """Record an attempt that no rank has seen committed, with the outcomes of all ranks."""
        self._may_have_counted |= all(outcome.is_unknown for outcome in outcomes)

    def left_out(self, why: str) -> None:
        """Log that the other groups have continued without this one."""
        if self.may_count:
            self._announced = True
            self._log(
                "the other groups go on without this group: %s; what it learned since %s counts later if it "
                "misses at most %s",
                why, self._since, count_text(self._late_rounds, "synchronization"),
            )  # fmt: skip
        elif self._late_rounds:
            self._log("the other groups go on without this group: %s", why)
        elif self._has_parts:
            self._log(
                "the other groups go on without this group: %s; it loses what it learned in the parts of the "
                "model that they synchronize without it",
                why,
            )
        else:
            self._log(
                "the other groups go on without what this group learned since synchronization %d: %s",
                self._rounds, why,
            )  # fmt: skip

    def committed(self, during: Register) -> None:
        """Log whether the round of the register `during`, which is committed, has counted the late work."""
        missed = during.rounds - self._rounds
        if (missed > 0 or self._announced) and self._late_rounds:
            if self._index in during.counting:
                self._count(during.rounds + 1)
            elif self._may_have_counted:
                self._log(
                    "the other groups may have counted what this group learned %s, so it does not count "
                    "again",
                    self._missed,
                )
            else:
                self._lose(self._missed, f"this group missed {count_text(missed, 'synchronization')}")
        self._may_have_counted = self._announced = False

    def finished(self) -> None:
        """Log that the late work is lost, if there is any, because the others have finished the training."""
        if self.may_count:
            self._lose(f"since {self._since}", "the others have finished the training")

    def _count(self, number: int) -> None:
        if self._has_parts:
            self._log("what this group learned counts from synchronization %d on, part by part", number)
        else:
            self._log("synchronization %d counts what this group learned since %s", number, self._since)

    def _lose(self, what: str, why: str) -> None:
        self._log("what this group learned %s is lost: %s", what, why)

    @property
    def _since(self) -> str:
        """The synchronization after which this group learned what it has to bring."""
        return OF_EACH_PART if self._has_parts else f"synchronization {self._rounds}"

    @property
    def _missed(self) -> str:
        """What of the work cannot count any more once the others have averaged without this group."""
        return IN_PARTS if self._has_parts else f"since {self._since}"

    def _log(self, line: str, *arguments: object) -> None:
        if self._logs:
            log.warning(line, *arguments)
