"""The average over the elastic replica groups that are alive; all of them use it, or none does.

EnsembleSync, section 3: after T local steps the parameters are averaged over the workers that answer. Here a
worker is a replica group i of K_i ranks. A round, the attempt to average, has these stages:

    arrive   each rank reports that it is ready
    sum      the owners of each shard average it, in a copy; the group's parameters stay unchanged
    spread   all ranks of the group get the whole average
    vote     each rank reports that it has the whole average
    end      if the coordinator's register commits the round, the groups use the average; otherwise they
             repeat the round with the remaining groups

The model is cut into C shards, the same for all groups. C is the largest K_i, and rank j of a group owns the
shards c with c mod K_i = j. A group that missed rounds uses the average, and adds nothing or its late work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from uuid import uuid4

from torch import Tensor

from hpcsgd.comm import Communicator
from hpcsgd.comm.alike import Fact
from hpcsgd.comm.on_host import room_for, settle_all
from hpcsgd.elastic.attempt import Outcome, State, outcome, worst_of
from hpcsgd.elastic.client import Client, Evicted
from hpcsgd.elastic.contribution import Contribution, contributed
from hpcsgd.elastic.endings import Over
from hpcsgd.elastic.late_work import LateWork
from hpcsgd.elastic.register import Phase, Point, Register, Report, Vote
from hpcsgd.elastic.ring import Broken
from hpcsgd.elastic.rings import Rings, part_of
from hpcsgd.elastic.room import Room
from hpcsgd.errors import JobError, UserError

log = logging.getLogger(__name__)


class ElasticAverage:
    """One rank's access to the average over all replica groups; creating it is collective in the group.

    `replica_group`: the index of this group. `replica_groups`: the number of groups that were started.
    `host`: the address of this node in the job's own network. `heartbeat_timeout`: seconds without a message
    after which a group counts as lost. `timeout`: seconds to wait for a coordinator.
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
        heartbeat_timeout: float = 10.0,
        timeout: float = 300.0,
    ) -> None:
        self.rounds = 0
        """The number of committed rounds whose result this replica group has."""
        self.report = Report()
        """The report about the training that this rank sends in the next round; the training loop sets it."""
        self.seconds = 0.0
        """Seconds that this rank has spent averaging so far."""
        self.counted: tuple[int, ...] = ()
        """The replica groups whose models are in the last mean."""
        self.up_to_date: tuple[int, ...] = ()
        """Those of them that had missed no round before it, so that they were at the training's position."""
        self.index, self.count = replica_group, replica_groups
        """The index of this replica group, and the number of groups that were started."""
        self._group, self._coordinator, self._token = group, coordinator, token
        self._heartbeat_timeout, self._timeout = heartbeat_timeout, timeout
        self._rings = Rings(replica_group, host, token, heartbeat_timeout)
        self._generation = Register()
        """The register at the start of this generation, with its members."""
        self.after = Register()
        """The register after the last committed round, with the training's position and who has samples."""
        self._vote = Vote()
        self._due = 0  # the number of rounds that were committed before the next round
        self._why, self._blamed = "", None
        self._late_work = LateWork(replica_group, group.rank)
        self._room = Room()
        self._alike, self._contribution = True, None
        self._copies: list[Tensor] = []  # what this attempt has copied of the contribution's `shared`
        self._averaged: list[int] = []  # the indices of the tensors that this attempt averages
        self.covers_all = False
        """True if the last mean was one of all parts of the model."""
        self._processes, self._lives = group.gather_objects(uuid4().hex)[0], 0
        self._client = self._connect()

    @property
    def members(self) -> tuple[int, ...]:
        """The replica groups of this generation, which average together."""
        return self._generation.replica_groups

    @property
    def leaving(self) -> bool:
        """True if this replica group has to stop after the last committed round, alone or with all others."""
        return self.after.stops(self.index)

    def require_alike(self, facts: Sequence[Fact]) -> None:
        """Have `mean` raise `JobError` in groups that were given other `facts`; see `group_facts`."""
        self._rings.facts = facts

    def mean(
        self, w: Sequence[Tensor], t: int = 0, *, alike: bool = True, contribution: Contribution | None = None
    ) -> None:
        """Replace `w`, the model after `t` updates, with its mean over the living replica groups; collective.

        `alike`: all ranks of the group have the same `w`. Otherwise (FSDP) each rank has its own rows, and
        all groups must have the same number of ranks. `contribution` makes what is averaged in place of `w`.
        Raises `Over` if the others have finished, and `PeerLost` if the coordinator is gone.
        """
        aside, self._alike, self._contribution = self._room.of(w), alike, contribution
        self._vote = Vote(Point(t, *self.report.deal), self.report.leaving)
        self._late_work.begin(contribution, self.rounds)
        settle_all(w)  # computing must not count as waiting, and `aside` must have been copied
        started = time.perf_counter()
        while not self._attempt(w, aside):
            pass
        self.seconds += time.perf_counter() - started
        shared = contribution.shared if contribution is not None and self._copies else ()
        results = [*((w[i], aside[i]) for i in self._averaged), *zip(shared, self._copies, strict=True)]
        for x, mean in results:
            x.copy_(mean, non_blocking=True)

    def move(self) -> None:
        """Report that this replica group leaves to return with more or fewer ranks; the others wait."""
        with suppress(Evicted):  # an evicted group returns like any lost group
            self._client.move()
        self._group.barrier()  # the first rank that leaves ends the others, before they have reported

    def wait(self) -> None:
        """Wait until the generation has ended. Raises `Over` if the others have finished. Collective."""
        self._agree(self._wait_for_the_end)

    def finish(self) -> None:
        """Report that the training is done and saved, so that lost groups do not return."""
        with suppress(Evicted):  # if this group was evicted, the others finish and save again
            self._client.finish(self._generation.generation)

    def close(self) -> None:
        """Close all connections, which tells the coordinator and other groups that this rank leaves."""
        self._client.close()
        self._rings.close()

    def _attempt(self, w: Sequence[Tensor], aside: Sequence[Tensor]) -> bool:
        """Try once to average `w` into `aside`; return, on all ranks alike, if the round was committed."""
        self._why, self._blamed = "another rank of the replica group is in trouble", None
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
            self._spread([*(aside[i] for i in self._averaged), *self._copies])
        # If any rank has seen the commit, the round is committed, even if other ranks were evicted before
        # they heard of it.
        outcomes = self._group.gather_objects(self._outcome(state))
        seen = [found.registers for found in outcomes if found.registers is not None]
        if not seen:
            self._late_work.failed(outcomes)
            return False
        during, self.after = seen[0]
        self.counted, self.up_to_date = during.counting, during.up_to_date
        self.covers_all = len(self._averaged) == len(w)
        self._late_work.committed(during)
        self.rounds = self._due = self.after.rounds
        return True

    def _agree(self, stage: Callable[[], None]) -> State:
        """Run `stage` of a round on this rank; return the worst `State` of the group's ranks. Collective."""
        state, unlike = State.FINE, None
        try:
            stage()
        except Evicted as error:
            state, self._why = State.EVICTED, str(error)
        except Over:
            state = State.OVER
        except JobError as error:
            state, unlike = State.UNLIKE, error
        except OSError as error:
            state, self._why = State.OUTSIDE, str(error)
            if isinstance(error, Broken):
                self._blamed = self._generation.neighbour(self.index, error.side)
        return worst_of(self._group, state, unlike)

    def _wait_for_the_end(self) -> None:
        if self._client.outcome(self._generation.generation, self._due).phase is Phase.FINISHED:
            raise Over

    def _look_around(self) -> None:
        """Raise `OSError` if the last round's generation, which is a fixed set of groups, has ended."""
        now = self._client.register
        if now.phase is not Phase.RUN or now.generation != self._generation.generation:
            raise ConnectionError("the generation has ended")

    def _enter(self) -> None:
        """Ask to join the groups that average, and wait for a generation with this replica group."""
        self._rings.drop()
        now = self._client.come(self._rings.address, self.rounds, brings=self._late_work.may_count)
        if now.phase is Phase.FINISHED:
            self._late_work.finished()
            raise Over
        self._generation, self._due = now, now.rounds
        if self._group.rank == 0:
            members = ", ".join(map(str, now.replica_groups))
            log.info("generation %d: replica groups %s average", now.generation, members)

    def _sum(self, w: Sequence[Tensor], aside: Sequence[Tensor]) -> None:
        """Average this rank's shards of `w` into `aside`. Raises `OSError` if a connection breaks."""
        now = self._generation
        self._client.arrive(now.generation, self._due)
        here = self._client.register
        if here.generation != now.generation:
            raise ConnectionError("the generation has ended")
        shared = self._contribution.shared if self._contribution and here.catches_up else ()
        self._copies = [room_for(x, x.dtype) for x in shared]
        rank, size = self._group.rank, self._group.size
        sizes = {member.ranks for member in now.members}
        for c in range(rank, max(sizes), size):
            ring = self._rings.of(c, now, self._is_overdue, lambda: self._is_past(now))
            if not self._alike and sizes != {size}:  # after the comparison, by which one of others ends alone
                raise UserError(
                    f"groups of {sorted(sizes)} ranks: [parallel] fsdp needs the same number in each"
                )
            part = (c, max(sizes)) if self._alike else (0, 1)
            self._rings.copies(shared, self._copies, *part, ring, min(here.up_to_date))
            tensors: Sequence[Tensor | None] = w
            if (added := self._contribution) is not None:
                newest, t = self._copies if self.index in here.late else (), self._vote.place.t
                tensors = contributed(added, self.index, t, self.report, here, ring, newest)
            self._averaged = [i for i, x in enumerate(tensors) if x is not None]
            self._rings.mean(tensors, aside, *part, ring, here.counting)

    def _is_overdue(self, since: float) -> bool:
        """Return True if this rank has waited too long for a neighbour in the ring, since time `since`.

        While some groups still train there is no limit: the coordinator removes those that are too late.
        """
        complete = self._client.complete_since(self._generation.generation, self._due)
        return complete is not None and time.monotonic() - max(since, complete) > self._heartbeat_timeout

    def _spread(self, results: Sequence[Tensor]) -> None:
        """Broadcast each shard of `results` from its owner to every rank of the group. Collective."""
        if not self._alike:
            return
        C = max(member.ranks for member in self._generation.members)
        for c in range(C):
            for x in results:
                self._group.bcast(part_of(x, c, C), root=c % self._group.size).wait()

    def _outcome(self, state: State) -> Outcome:
        """Vote or object; return the outcome of the round."""
        g, r = self._generation.generation, self._due
        voted = False
        with suppress(Evicted):  # the next attempt notices that this group was evicted
            during = self._client.register
            if voted := state is State.FINE:
                after = self._client.vote(g, r, self._vote, self.report.progress, self.report.step_seconds)
            else:
                after = self._client.object(g, r, self._why, self._blamed)
            return outcome(g, r, during, after, voted=voted)
        return Outcome(is_unknown=voted)

    def _come_back(self) -> None:
        """Connect to the coordinator again, as a new life of the replica group; all its ranks do so."""
        self._late_work.left_out(self._why)
        self._client.close()
        self._rings.drop()
        self._generation = Register()
        self._client = self._connect()

    def _connect(self) -> Client:
        self._lives += 1
        place = {"replica_group": self.index, "rank": self._group.rank, "ranks": self._group.size}
        return Client(
            self._coordinator, self._token, {**place, "life": f"{self._processes}.{self._lives}"},
            heartbeat_timeout=self._heartbeat_timeout, patience=self._timeout,
            on_change=self._cut_what_is_past,
        )  # fmt: skip

    def _cut_what_is_past(self, now: Register | None) -> None:
        """Interrupt sums in the rings of a generation that has ended. The client's thread calls this."""
        if now is None or now.phase is not Phase.RUN or now.generation != self._generation.generation:
            self._rings.cut()

    def _is_past(self, generation: Register) -> bool:
        last = self._client.last
        return last.phase is not Phase.RUN or last.generation != generation.generation or self._client.ended
