"""Which ranks have arrived at the current round, and for which groups the round no longer waits."""

from __future__ import annotations

import math

from hpcsgd.elastic.register import Phase, Register


class Arrivals:
    """The ranks that have arrived at the current round.

    The round waits `timeout` seconds for groups that are alive. As soon as all ranks of `quorum` counting
    groups have arrived, it waits at most `grace` seconds more.
    """

    def __init__(self, timeout: float, quorum: int | None = None, grace: float = math.inf) -> None:
        self.timeout = timeout
        self._quorum, self._grace = quorum, grace
        self._ranks: set[tuple[int, int]] = set()
        self._enough_since: float | None = None
        """The clock when the last group that the quorum needed had arrived; None before that."""
        self._ready_since: float | None = None
        """The clock when the first group was ready in an open register; None before that."""

    def clear(self) -> None:
        """Begin with a new round, at which no rank has arrived."""
        self._ranks.clear()
        self._enough_since = self._ready_since = None

    def suffice(self, now: Register, ready: int, clock: float, since: float) -> bool:
        """Return whether the open register `now` should close without the groups that have not come yet.

        The coordinator calls this again and again. `ready` is the number of groups that have asked to join
        and whose parameters count; the limits are those of a round, and begin with the first of these groups.
        Before the first round the quorum does not apply, so that groups that start slowly are not left out.
        `clock` is the time now, and `since` that of the last change of the register.
        """
        if not ready:
            self._enough_since = self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = clock
        if self._quorum is not None and now.rounds and self._enough_since is None and ready >= self._quorum:
            self._enough_since = clock
        enough = math.inf if self._enough_since is None else self._enough_since + self._grace
        return clock > min(max(self._ready_since, since) + self.timeout, enough)

    def add(self, replica_group: int, rank: int, now: Register, clock: float) -> None:
        """Record that a rank has arrived at the round of the register `now`."""
        self._ranks.add((replica_group, rank))
        if self._quorum is not None and self._enough_since is None and self._complete(now) >= self._quorum:
            self._enough_since = clock

    def are_all(self, now: Register) -> bool:
        """Return True if all ranks of all members have arrived."""
        return frozenset(self._ranks) == now.clients

    def have_begun(self, now: Register) -> bool:
        """Return True if a rank of a counting group has arrived."""
        return any(replica_group in now.counting for replica_group, _ in self._ranks)

    def deadline(self, now: Register, since: float) -> float:
        """Return the clock after which the round waits for no further group, infinite if it is not known.

        `since` is the clock when the round began to wait for groups.
        """
        if now.phase is not Phase.RUN or not self.have_begun(now):
            return math.inf
        enough = math.inf if self._enough_since is None else self._enough_since + self._grace
        return min(since + self.timeout, enough)

    def late(self, now: Register, clock: float, since: float) -> dict[int, str]:
        """Return the groups for which the round no longer waits, with the reason.

        `since` is the clock when the round began to wait for them.
        """
        if clock <= self.deadline(now, since):
            return {}
        why = f"it did not arrive within {self._grace:g} s after the quorum of {self._quorum}"
        if clock > since + self.timeout:
            why = f"it did not arrive within {self.timeout:g} s"
        return {replica_group: why for replica_group, _ in sorted(now.clients - self._ranks)}

    def _complete(self, now: Register) -> int:
        """Return the number of counting groups of which all ranks have arrived."""
        missing = {replica_group for replica_group, _ in now.clients - self._ranks}
        return len(set(now.counting) - missing)
