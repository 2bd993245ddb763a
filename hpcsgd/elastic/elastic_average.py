"""Meetings of islands: the mean over those that are alive, taken by all of them or by none.

EnsembleSync, section 3: after T local steps the parameters are averaged over the workers that answer. Here a
worker is an island of K_i ranks, and what it computes meanwhile stays untouched until the register says that
the round is committed:

    arrive → sum of each chunk over its owners, aside → all ranks of the island get the whole
           → vote → committed: take it; otherwise: again, with those who are left

The model is cut in C chunks, the same for all islands: C is the largest K_i, and rank j of an island owns the
chunks c with c mod K_i = j. Who comes from further back than others adds nothing and takes the mean.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from uuid import uuid4

import torch
from torch import Tensor

from hpcsgd.comm import Communicator, accumulation_dtype
from hpcsgd.comm.on_host import room_for, settle_all
from hpcsgd.elastic.client import Client, Evicted
from hpcsgd.elastic.register import Phase, Point, Register, Report, Vote
from hpcsgd.elastic.ring import Broken
from hpcsgd.elastic.rings import Rings, part_of
from hpcsgd.errors import UserError

log = logging.getLogger(__name__)


class Over(Exception):
    """The other islands have finished the training, and saved it."""


class State(IntEnum):
    """Of an attempt on one rank; that of the island is its worst."""

    FINE = 0
    OUTSIDE = 1
    """Of a running generation, or in trouble with it."""
    EVICTED = 2
    OVER = 3


class ElasticAverage:
    """One on every rank of an island, made by all at once.

    `replica_groups`: how many were started. `host`: the address of this node in the job's own network.
    `silence`: seconds after which those that say nothing are left behind. `timeout`: seconds to wait for
    islands that are alive but do not arrive.
    """

    def __init__(
        self,
        replica_group: int,
        group: Communicator,
        coordinator: str,
        token: str,
        host: str,
        *,
        replica_groups: int = 1,
        silence: float = 10.0,
        timeout: float = 300.0,
    ) -> None:
        self.rounds = 0
        """Of which this island holds the mean."""
        self.report = Report()
        """What goes with the next round; to be handed over by whoever trains."""
        self.seconds = 0.0
        """Spent in meetings."""
        self.counted: tuple[int, ...] = ()
        """The islands whose models made the last mean."""
        self.index, self.count = replica_group, replica_groups
        """Of this island, and how many were started."""
        self._group = group
        self._coordinator, self._token = coordinator, token
        self._heartbeat_timeout, self._timeout = silence, timeout
        self._rings = Rings(replica_group, host, token, silence)
        self._generation = Register()
        """As it closed: who the members are, and where they came from."""
        self.after = Register()
        """What the last committed round left behind: where the training is, how its samples were dealt."""
        self._vote = Vote()
        self._due = 0
        """Rounds there are before the one that is due."""
        self._why, self._blamed = "", None
        self._control: list[Tensor] = []
        self._alike = True
        self._processes, self._lives = group.gather_objects(uuid4().hex)[0], 0
        self._client = self._connect()

    @property
    def members(self) -> tuple[int, ...]:
        """The islands that averaged last."""
        return self._generation.replica_groups

    @property
    def leaving(self) -> bool:
        """Whether this island is to stop here, by itself or with all others."""
        return self.after.stops(self.index)

    def mean(self, w: Sequence[Tensor], t: int = 0, *, alike: bool = True) -> None:
        """Replace `w` after `t` updates by its mean over the living islands; collective. `alike`: all ranks
        of the island have the same, or else each its rows, and all islands are of as many ranks.

        Raises `Over` where the others have finished, and `PeerLost` where the coordinator is gone.
        """
        aside, self._alike = self._room_for(w), alike
        report = self.report
        self._vote = Vote(Point(t, *report.deal), report.leaving)
        settle_all(w)  # computing is no waiting for others; the last mean has left `aside`
        started = time.perf_counter()
        while not self._attempt(w, aside):
            pass
        self.seconds += time.perf_counter() - started
        for x, mean in zip(w, aside, strict=True):
            x.copy_(mean, non_blocking=True)

    def move(self) -> None:
        """This island leaves, to come back with other ranks: the others are to wait."""
        with suppress(Evicted):  # then it comes back as any other that was lost
            self._client.move()

    def finish(self) -> None:
        """All is done and saved: nobody has to come any more."""
        with suppress(Evicted):  # then the others save it once more
            self._client.finish(self._generation.generation)

    def close(self) -> None:
        """Leave; the others are told at once."""
        self._client.close()
        self._rings.close()

    def _room_for(self, w: Sequence[Tensor]) -> list[Tensor]:
        """For a mean of `w`. It is kept: the first touch of fresh memory costs as much as the sum itself.

        Of 16-bit floats in float32: the sum goes around, from island to island."""
        if [(x.shape, x.dtype) for x in self._control] != [(x.shape, accumulation_dtype(x.dtype)) for x in w]:
            self._control = [room_for(x, accumulation_dtype(x.dtype)) for x in w]
        return self._control

    def _attempt(self, w: Sequence[Tensor], aside: Sequence[Tensor]) -> bool:
        """Whether the round was committed, the same on all ranks of the island."""
        self._why, self._blamed = "another rank of the island is in trouble", None
        state = self._agree(self._look_around)
        if state is State.OUTSIDE:
            state = self._agree(self._enter)
            if len(set(self._group.gather_objects(self._generation.generation))) > 1:
                state = State.OUTSIDE
        if state is State.FINE:
            state = self._agree(lambda: self._sum(w, aside))
        if state is State.EVICTED:
            self._come_back()
            return False
        if state is State.FINE:
            self._spread(aside)
        # What one rank has seen committed is, whatever the others heard before they were evicted.
        seen = [after for after in self._group.gather_objects(self._outcome(state)) if after is not None]
        if not seen:
            return False
        self.after, self.counted = seen[0]
        self.rounds = self._due = self.after.rounds
        return True

    def _agree(self, stage: Callable[[], None]) -> State:
        """Do it on every rank of the island; the worst that came of it."""
        state = State.FINE
        try:
            stage()
        except Evicted:
            state = State.EVICTED
        except Over:
            state = State.OVER
        except OSError as error:
            state, self._why = State.OUTSIDE, str(error)
            if isinstance(error, Broken):
                self._blamed = self._neighbour(error.side)
        worst = torch.tensor([state], dtype=torch.int32, device="cpu")
        self._group.allreduce(worst, "max").wait()
        if worst.item() == State.OVER:
            raise Over
        return State(int(worst.item()))

    def _look_around(self) -> None:
        """Raises `OSError` where the register is not that of a generation that this island is in."""
        now = self._client.register
        if now.phase is not Phase.RUN or now.generation != self._generation.generation:
            raise ConnectionError("the generation has ended")

    def _enter(self) -> None:
        """Wait for a generation that this island is in."""
        self._rings.drop()
        now = self._client.come(self._rings.address, self.rounds)
        if now.phase is Phase.FINISHED:
            raise Over
        self._generation, self._due = now, now.rounds
        if self._group.rank == 0:
            log.info(
                "generation %d: islands %s average", now.generation, ", ".join(map(str, now.replica_groups))
            )

    def _sum(self, w: Sequence[Tensor], aside: Sequence[Tensor]) -> None:
        """The mean of the chunks that this rank owns, in `aside`. Raises `OSError`."""
        now = self._generation
        self._client.arrive(now.generation, self._due)
        counting = self._client.register.counting
        rank, size = self._group.rank, self._group.size
        sizes = {member.ranks for member in now.members}
        if not self._alike and sizes != {size}:
            raise UserError(f"islands of {sorted(sizes)} ranks: [parallel] fsdp asks for as many in each")
        for c in range(rank, max(sizes), size):
            ring = self._rings.of(c, now, self._is_overdue, lambda: self._is_past(now))
            part = (c, max(sizes)) if self._alike else (0, 1)
            self._rings.mean(w, aside, *part, ring, counting)

    def _is_overdue(self, since: float) -> bool:
        """Islands may train for long; once all are there a neighbour has no excuse."""
        complete = self._client.complete_since(self._generation.generation, self._due)
        if complete is None:
            return time.monotonic() - since > self._timeout
        return time.monotonic() - max(since, complete) > self._heartbeat_timeout

    def _neighbour(self, side: int) -> int:
        members = self._generation.replica_groups
        return members[(members.index(self.index) + side) % len(members)]

    def _spread(self, aside: Sequence[Tensor]) -> None:
        """Every rank of the island gets the chunks of the others."""
        if not self._alike:
            return
        C = max(member.ranks for member in self._generation.members)
        for c in range(C):
            for mean in aside:
                self._group.bcast(part_of(mean, c, C), root=c % self._group.size).wait()

    def _outcome(self, state: State) -> tuple[Register, tuple[int, ...]] | None:
        """The register that commits the round, and who counted in it; or nothing."""
        g, r = self._generation.generation, self._due
        with suppress(Evicted):  # of which the next attempt hears
            counting = self._client.register.counting
            if state is State.FINE:
                after = self._client.vote(g, r, self._vote, self.report.progress, self.report.step_seconds)
            else:
                after = self._client.object(g, r, self._why, self._blamed)
            if (after.generation, after.rounds) == (g, r + 1):
                return after, counting
        return None

    def _come_back(self) -> None:
        """As a new life, all ranks of the island together."""
        self._client.close()
        self._rings.drop()
        self._generation = Register()
        self._client = self._connect()

    def _connect(self) -> Client:
        self._lives += 1
        life = f"{self._processes}.{self._lives}"
        hello = {
            "replica_group": self.index,
            "rank": self._group.rank,
            "ranks": self._group.size,
            "life": life,
        }
        return Client(
            self._coordinator, self._token, hello,
            silence=self._heartbeat_timeout, patience=self._timeout, on_change=self._cut_what_is_past,
        )  # fmt: skip

    def _cut_what_is_past(self, now: Register | None) -> None:
        """Called by the client's thread: whoever waits in a ring is to look up."""
        if now is None or now.phase is not Phase.RUN or now.generation != self._generation.generation:
            self._rings.cut()

    def _is_past(self, generation: Register) -> bool:
        last = self._client.last
        return last.phase is not Phase.RUN or last.generation != generation.generation or self._client.ended
