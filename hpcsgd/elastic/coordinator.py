"""The coordinator: a small server that keeps the register, receives events and informs all ranks.

The register records which replica groups average (see `register`). The coordinator runs where the groups were
started: in the batch step or next to the launcher. A message is one JSON object per line. A rank introduces
itself, asks to join, reports that it arrived at a round, votes, objects or finishes, and sends a heartbeat
every second. The coordinator answers heartbeats, and sends each change of the register. It first writes the
change to disk, from where the next coordinator continues (see `journal`). A replica group is lost if one of
its connections breaks or is silent, so that dead processes are noticed at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from hpcsgd.elastic.arrivals import Arrivals
from hpcsgd.elastic.connection import Connection, greeted
from hpcsgd.elastic.event_log import EventLog, Loss
from hpcsgd.elastic.handshake import GREETING
from hpcsgd.elastic.journal import Journal, Superseded
from hpcsgd.elastic.membership import Membership
from hpcsgd.elastic.membership_log import MembershipLog, committed
from hpcsgd.elastic.pending_connections import PendingConnections
from hpcsgd.elastic.processes import Processes
from hpcsgd.elastic.register import Phase, Point, Register, Vote
from hpcsgd.elastic.resource_budget import ResourceBudget, StepTimes
from hpcsgd.elastic.watch import Watch, beat

log = logging.getLogger(__name__)

STARTED_AGAIN = "it was started again"
"""The reason that is reported when a replica group is lost because newer processes run it."""


class Coordinator:
    """The server, which runs until the training is finished and all clients have left.

    `heartbeat_timeout`: seconds without a heartbeat after which a replica group is lost. `timeout`: seconds
    that an open register, or a round, waits for groups that are alive once a group that counts is ready. It
    must exceed the time by which working groups differ. `quorum`, `grace`: see `Arrivals`. `late_rounds`: see
    `Membership`. `journal`: where the register is saved. `events`: the event log. `budget`: the resource to
    move between groups, if any. `together`: the first generation waits for all groups, and all stop when one
    has to stop. Otherwise groups come and go independently.
    """

    def __init__(
        self,
        replica_groups: int,
        token: str,
        *,
        heartbeat_timeout: float = 10.0,
        timeout: float = 300.0,
        quorum: int | None = None,
        grace: float = math.inf,
        late_rounds: int = 0,
        journal: Journal | None = None,
        events: EventLog,
        budget: ResourceBudget | None = None,
        together: bool = True,
    ) -> None:
        saved = Register() if journal is None else journal.load()
        expected = saved.replica_groups or (range(replica_groups) if together else ())
        self.membership = Membership(frozenset(expected), saved, together=together, late_rounds=late_rounds)
        self.superseded = False
        """True if there is a later coordinator, so that this one sends nothing more."""
        for replica_group in saved.going:
            self.membership.lose(replica_group)  # the group had to stop, and has left or will leave soon
        self.address = ""
        self._token = token
        self._heartbeat_timeout = heartbeat_timeout
        self._journal, self._membership_log = journal, MembershipLog(events, late_rounds)
        self._clients: set[Connection] = set()
        self._strangers = PendingConnections()
        self._reported = saved
        self._watch = Watch(beat(heartbeat_timeout))
        self._since = self._watch.look()
        """The clock when waiting began: at the last change, or when the first counting member arrived."""
        self._arrivals = Arrivals(timeout, quorum, grace)
        self._quarrels: Counter[frozenset[int]] = Counter()
        """For each pair of replica groups, how many rounds failed because they did not reach each other."""
        self._budget = budget
        self._moving: set[Connection] = set()
        """Clients whose replica group leaves to come back with more or fewer ranks."""
        self._processes = Processes()
        self._awaited: set[int] = set()
        """The replica groups that left to come back with more or fewer ranks, and are not back yet."""
        self._step_times = StepTimes()

    @property
    def register(self) -> Register:
        return self.membership.register

    async def serve(self, host: str, port: int = 0) -> None:
        """Serve clients at `host`, an address in the job's own network; set `address` once listening."""
        server = await asyncio.start_server(self._converse, host, port)
        self.address = "{}:{}".format(*server.sockets[0].getsockname()[:2])
        async with server:
            while self._needed():
                await asyncio.sleep(beat(self._heartbeat_timeout) / 4)
                self._look_around()

    def _needed(self) -> bool:
        over = self.register.phase is Phase.FINISHED and not self._clients
        return not (over or self.superseded)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = None
        try:
            with self._strangers.one_more(writer.transport.abort):
                client = await asyncio.wait_for(greeted(reader, writer, self._token, self._watch), GREETING)
            self._admit(client)
            while line := await reader.readline():
                client.heard = self._watch.look()
                self._hear(client, json.loads(line))
        except (OSError, EOFError, TimeoutError, ValueError, KeyError, TypeError) as error:
            log.debug("a connection ended: %r", error)
        except asyncio.CancelledError:  # raised when the process ends; asyncio would report it as an error
            self._clients.clear()  # so that no group counts as lost
        finally:
            if client is not None:
                self._dismiss(client)
            writer.close()

    def _admit(self, client: Connection) -> None:
        if self.superseded:
            raise ConnectionError("the next coordinator is elsewhere")
        self._processes.add(client)
        if self._processes.were_followed(client):
            self._evict(client, STARTED_AGAIN)
            raise ConnectionError(STARTED_AGAIN)
        theirs = {other for other in self._clients if other.replica_group == client.replica_group}
        others = theirs - self._moving
        if any(other.life != client.life for other in others):
            self._lose(client.replica_group, Loss.DIED, STARTED_AGAIN)
        self._clients.add(client)
        self._awaited.discard(client.replica_group)
        client.tell({"register": self.register.to_json()})

    def _evict(self, client: Connection, why: str) -> None:
        client.tell({"evicted": why, "for_good": self._processes.were_followed(client)})
        client.writer.close()

    def _dismiss(self, client: Connection) -> None:
        if client in self._clients:
            self._clients.remove(client)
            over = self.register.phase is Phase.FINISHED or self.register.leaving
            if self._watch.just_woke():  # the client gave up on this coordinator, and will return
                self._since = self._watch.look()
            elif client.replica_group in self.register.going:
                self._lose(client.replica_group, Loss.LEFT, "it had to stop")
            elif not over and client not in self._moving:
                self._lose(client.replica_group, Loss.DIED, "its connection broke")
            self._moving.discard(client)

    def _hear(self, client: Connection, message: Mapping[str, Any]) -> None:
        if client not in self._clients:
            return
        membership, group = self.membership, client.replica_group
        match message["do"]:
            case "beat":
                client.tell({"beat": True})
            case "come" if not self.register.grants(group, message["generation"]):
                address, rounds, brings = (message[name] for name in ("address", "rounds", "brings"))
                membership.come(group, client.rank, client.ranks, address, rounds, brings=brings)
            case "arrive" if self._is_due(message):
                self._arrive(client)
            case "vote" if self._is_due(message):
                if group in self.register.counting:
                    self._membership_log.hear(message["progress"])
                self._step_times.add(group, message["pace"])
                ballot = Vote(Point(**message["place"]), message["leaving"])
                membership.vote(group, client.rank, message["generation"], message["rounds"], ballot)
                self._allot()
            case "object" if self._is_due(message):
                self._object(group, message)
            case "move":
                self._moving.add(client)
                self._awaited.add(group)
                membership.expect(group)
                client.tell({"moved": True})  # after that the client may close the connection
            case "finish":
                membership.finish(group, message["generation"])
            case "come" | "arrive" | "vote" | "object":
                pass  # about an earlier round
            case unknown:
                raise ValueError(f"{unknown!r} is nothing that a client says")
        self._publish()

    def _is_due(self, message: Mapping[str, Any]) -> bool:
        now, its_round = self.register, (message["generation"], message["rounds"])
        return now.phase == Phase.RUN and (now.generation, now.rounds) == its_round

    def _arrive(self, client: Connection) -> None:
        """Record that a rank is ready to average. The first one of a counting group starts the time limit."""
        now, had_begun = self.register, self._arrivals.have_begun(self.register)
        self._arrivals.add(client.replica_group, client.rank, now, self._watch.look())
        if self._arrivals.have_begun(now) and not had_begun:
            self._since = self._watch.look()
        if self._arrivals.are_all(now):
            self._tell_all({"all_arrived": [now.generation, now.rounds]})

    def _object(self, replica_group: int, message: Mapping[str, Any]) -> None:
        """Abort the round; if two groups fail to reach each other twice, remove the `lesser` one."""
        log.info("replica group %d objects to round %d: %s", replica_group, message["rounds"], message["why"])
        pair = frozenset({replica_group, message["blamed"]})
        self.membership.object(replica_group, message["generation"], message["rounds"])
        if message["blamed"] is not None:
            self._quarrels[pair] += 1
            if self._quarrels[pair] > 1:  # otherwise all rounds would fail: both reach only the coordinator
                del self._quarrels[pair]
                why = f"replica groups {min(pair)} and {max(pair)} do not reach each other"
                self._lose(self.membership.lesser(pair), Loss.CUT, why)

    def _allot(self) -> None:
        """Rebalance the groups' resources, if there is a budget and samples have just been assigned."""
        before, now = self._reported, self.register
        was_assigned = (now.assigned_at, now.sharing) != (before.assigned_at, before.sharing)
        if self._budget is None or not was_assigned:
            return
        units = self._budget.units(now, self._step_times.seconds(now.place.t - before.assigned_at.t))
        if units is not None:
            log.info("%s from now on: %s", self._budget.resource, units)
            self.membership.allot(units)
            self._membership_log.events.units(unit=self._budget.resource, units=units)

    def _lose(self, replica_group: int, kind: Loss, why: str) -> None:
        theirs = {client for client in self._clients if client.replica_group == replica_group}
        self._clients -= theirs
        for client in theirs:
            self._evict(client, why)
        log.info("replica group %d is no longer a member: %s", replica_group, why)
        self._membership_log.lose(self.register, replica_group, kind, why)
        if kind is Loss.CUT:
            self.membership.leave_out(replica_group)
        else:
            self.membership.lose(replica_group)
        self._publish()

    def _publish(self) -> None:
        now, before = self.register, self._reported
        if now == before:
            return
        if not self._still(lambda journal: journal.write(now)):
            return
        self._reported = now
        self._since = self._watch.look()
        self._arrivals.clear()
        self._tell_all({"register": now.to_json()})
        self._membership_log.note(before, now)
        if committed(before, now):
            self._quarrels.clear()

    def _still(self, asked: Callable[[Journal], None]) -> bool:
        """Call `asked`; return True. If a later coordinator exists, disconnect all clients; return False."""
        try:
            if self._journal is not None and not self.superseded:
                asked(self._journal)
        except Superseded as later:
            log.info("%s", later)
            self.superseded = True
            for client in self._clients:
                client.writer.close()
            self._clients.clear()  # so that no group counts as lost
        return not self.superseded

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for client in self._clients:
            client.tell(message)

    def _look_around(self) -> None:
        """Remove groups that send no heartbeats, and end waits that have lasted too long."""
        if not self._still(lambda journal: journal.require_current()):
            return
        clock = self._watch.look()
        for client in [client for client in self._clients if clock - client.heard > self._heartbeat_timeout]:
            if client in self._clients:
                why = f"nothing was heard of rank {client.rank} for {self._heartbeat_timeout:g} s"
                self._lose(client.replica_group, Loss.SILENT, why)
        now = self.register
        here = {client.replica_group for client in self._clients}
        waited = clock - self._since
        if waited > self._heartbeat_timeout and now.phase is not Phase.FINISHED and not now.leaving:
            for replica_group in (set(now.replica_groups) & self.membership.expected) - here - self._awaited:
                # This coordinator was just started, and the group did not reconnect.
                self._lose(replica_group, Loss.DIED, "it did not come back")
        if now.phase is Phase.OPEN:
            ready = len(self.membership.ready())
            if self._arrivals.suffice(now, ready, clock, self._since):
                self.membership.wait_no_longer()
        for replica_group, why in self._arrivals.late(now, clock, self._since).items():
            self._lose(replica_group, Loss.LATE, why)
        self._publish()
