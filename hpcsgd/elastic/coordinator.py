"""The coordinator: one small server that keeps the register, hears every rank and tells all of them.

It runs where the islands were started: in the batch step or beside the launcher. What is said is one JSON
object a line. A rank says hello and then comes, arrives, votes, objects or finishes, and beats once a second;
the coordinator says what the register is, whenever it changes, and beats too. A connection that breaks or
falls silent is a lost island; processes that die are so noticed at once. The register is written down before
anybody hears of it, so the next coordinator goes on where this one was; see `journal`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from hpcsgd.elastic.connection import Connection, greeted
from hpcsgd.elastic.event_log import EventLog, Loss
from hpcsgd.elastic.handshake import GREETING
from hpcsgd.elastic.journal import Journal, Superseded
from hpcsgd.elastic.membership import Membership
from hpcsgd.elastic.membership_log import MembershipLog, committed
from hpcsgd.elastic.pending_connections import PendingConnections
from hpcsgd.elastic.register import Phase, Point, Register, Vote
from hpcsgd.elastic.resource_budget import ResourceBudget, StepTimes
from hpcsgd.elastic.watch import Watch, beat

log = logging.getLogger(__name__)

STARTED_AGAIN = "it was started again"
"""Why an island is lost whose number others have now."""


class Coordinator:
    """Serves until the register is finished and all clients have left.

    `silence`: seconds without a sign of life after which an island is lost. `timeout`: seconds that an open
    register, or a round that the first island has arrived in, waits for islands that are alive; it must
    exceed what honest islands differ by. `journal`: where the register is written down. `events` is told
    what happens. `allotment` moves units of compute between the islands. `together`: all islands are waited
    for at first, and all stop when one has to; or else they come and go, each for itself.
    """

    def __init__(
        self,
        replica_groups: int,
        token: str,
        *,
        silence: float = 10.0,
        timeout: float = 300.0,
        journal: Journal | None = None,
        events: EventLog,
        allotment: ResourceBudget | None = None,
        together: bool = True,
    ) -> None:
        saved = Register() if journal is None else journal.load()
        expected = saved.replica_groups or (range(replica_groups) if together else ())
        self.membership = Membership(frozenset(expected), saved, together=together)
        self.superseded = False
        """There is a later one: this one says nothing more."""
        for replica_group in saved.going:
            self.membership.lose(replica_group)  # it has left, or will not be there for long
        self.address = ""
        self._token = token
        self._heartbeat_timeout, self._timeout = silence, timeout
        self._journal, self._chronicle = journal, MembershipLog(events)
        self._clients: set[Connection] = set()
        self._strangers = PendingConnections()
        self._told = saved
        self._watch = Watch(beat(silence))
        self._since = self._watch.look()
        """When this phase began, or a member that counts arrived."""
        self._arrived: set[tuple[int, int]] = set()
        self._quarrels: Counter[frozenset[int]] = Counter()
        """How often a round was given up because two islands did not reach each other."""
        self._allotment = allotment
        self._moving: set[Connection] = set()
        """They leave to come back with other ranks."""
        self._processes: defaultdict[int, list[str]] = defaultdict(list)
        """That have been each island, one after the other."""
        self._awaited: set[int] = set()
        """Their islands, until they are back."""
        self._paces = StepTimes()

    @property
    def register(self) -> Register:
        return self.membership.register

    async def serve(self, host: str, port: int = 0) -> None:
        """Listen at `host`, an address of the job's own network; `address` is known once this has begun."""
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
        except asyncio.CancelledError:  # of the process that ends, which asyncio would tell as a fault
            self._clients.clear()  # nobody is lost by that
        finally:
            if client is not None:
                self._dismiss(client)
            writer.close()

    def _admit(self, client: Connection) -> None:
        if self.superseded:
            raise ConnectionError("the next coordinator is elsewhere")
        processes = self._processes[client.replica_group]
        if client.processes not in processes:
            processes.append(client.processes)
        if self._was_followed(client):
            self._evict(client, STARTED_AGAIN)
            raise ConnectionError(STARTED_AGAIN)
        theirs = {other for other in self._clients if other.replica_group == client.replica_group}
        others = theirs - self._moving
        if any(other.life != client.life for other in others):
            self._lose(client.replica_group, Loss.DIED, STARTED_AGAIN)
        self._clients.add(client)
        self._awaited.discard(client.replica_group)
        client.tell({"register": self.register.to_json()})

    def _was_followed(self, client: Connection) -> bool:
        """By other processes, which are that island now. Their launcher may have died before they did."""
        return client.processes in self._processes[client.replica_group][:-1]

    def _evict(self, client: Connection, why: str) -> None:
        client.tell({"evicted": why, "for_good": self._was_followed(client)})
        client.writer.close()

    def _dismiss(self, client: Connection) -> None:
        if client in self._clients:
            self._clients.remove(client)
            over = self.register.phase is Phase.FINISHED or self.register.leaving
            if self._watch.just_woke():  # it gave up on this coordinator, and will be back as to a new one
                self._since = self._watch.look()
            elif client.replica_group in self.register.going:
                self._lose(client.replica_group, Loss.LEFT, "it had to stop")
            elif not over and client not in self._moving:
                self._lose(client.replica_group, Loss.DIED, "its connection broke")
            self._moving.discard(client)

    def _hear(self, client: Connection, said: Mapping[str, Any]) -> None:
        if client not in self._clients:
            return
        membership, replica_group = self.membership, client.replica_group
        match said["do"]:
            case "beat":
                client.tell({"beat": True})
            case "come" if not self.register.grants(replica_group, said["generation"]):
                membership.come(replica_group, client.rank, client.ranks, said["address"], said["rounds"])
            case "arrive" if self._is_due(said):
                self._arrive(client)
            case "vote" if self._is_due(said):
                if replica_group in self.register.counting:
                    self._chronicle.hear(said["progress"])
                self._paces.add(replica_group, said["pace"])
                ballot = Vote(Point(**said["place"]), said["leaving"])
                membership.vote(replica_group, client.rank, said["generation"], said["rounds"], ballot)
                self._allot()
            case "object" if self._is_due(said):
                self._object(replica_group, said)
            case "move":
                self._moving.add(client)
                self._awaited.add(replica_group)
                membership.expect(replica_group)
                client.tell({"moved": True})  # only now may it close the connection
            case "finish":
                membership.finish(replica_group, said["generation"])
            case "come" | "arrive" | "vote" | "object":
                pass  # of the past
            case unknown:
                raise ValueError(f"{unknown!r} is nothing that a client says")
        self._publish()

    def _is_due(self, said: Mapping[str, Any]) -> bool:
        now = self.register
        return (now.phase, now.generation, now.rounds) == (Phase.RUN, said["generation"], said["rounds"])

    def _arrive(self, client: Connection) -> None:
        """The waiting begins with the first that has trained; who looks on is always early."""
        now = self.register
        if client.replica_group in now.counting and not any(i in now.counting for i, _ in self._arrived):
            self._since = self._watch.look()
        self._arrived.add((client.replica_group, client.rank))
        if self._arrived == now.clients:
            self._tell_all({"all_arrived": [now.generation, now.rounds]})

    def _object(self, replica_group: int, said: Mapping[str, Any]) -> None:
        """Two that do not reach each other, though both reach this, would give up the same round for ever:
        after the second time the later island is left out."""
        log.info("island %d objects to round %d: %s", replica_group, said["rounds"], said["why"])
        pair = frozenset({replica_group, said["blamed"]})
        self.membership.object(replica_group, said["generation"], said["rounds"])
        if said["blamed"] is not None:
            self._quarrels[pair] += 1
            if self._quarrels[pair] > 1:
                del self._quarrels[pair]
                self._lose(
                    max(pair), Loss.CUT, f"islands {min(pair)} and {max(pair)} do not reach each other"
                )

    def _allot(self) -> None:
        """Where samples have just been dealt."""
        before, now = self._told, self.register
        if self._allotment is None or now.assigned_at == before.assigned_at:
            return
        units = self._allotment.units(now, self._paces.seconds(now.place.t - before.assigned_at.t))
        if units is not None:
            log.info("%s from now on: %s", self._allotment.resource, units)
            self.membership.allot(units)
            self._chronicle.events.units(unit=self._allotment.resource, units=units)

    def _lose(self, replica_group: int, kind: Loss, why: str) -> None:
        theirs = {client for client in self._clients if client.replica_group == replica_group}
        self._clients -= theirs
        for client in theirs:
            self._evict(client, why)
        log.info("island %d is lost: %s", replica_group, why)
        self._chronicle.events.lost(replica_group=replica_group, kind=kind, why=why)
        if kind is Loss.CUT:
            self.membership.leave_out(replica_group)
        else:
            self.membership.lose(replica_group)
        self._publish()

    def _publish(self) -> None:
        now, before = self.register, self._told
        if now == before:
            return
        if not self._still(lambda journal: journal.write(now)):
            return
        self._told = now
        self._since = self._watch.look()
        self._arrived.clear()
        self._tell_all({"register": now.to_json()})
        self._chronicle.note(before, now)
        if committed(before, now):
            self._quarrels.clear()

    def _still(self, asked: Callable[[Journal], None]) -> bool:
        """Whether this is the coordinator after `asked`; otherwise all are to look for the next one."""
        try:
            if self._journal is not None and not self.superseded:
                asked(self._journal)
        except Superseded as later:
            log.info("%s", later)
            self.superseded = True
            for client in self._clients:
                client.writer.close()
            self._clients.clear()  # nobody is lost by that
        return not self.superseded

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for client in self._clients:
            client.tell(message)

    def _look_around(self) -> None:
        """What nobody says: silence, and waiting that has lasted too long."""
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
                self._lose(replica_group, Loss.DIED, "it did not come back")  # to this coordinator, a new one
        if waited > self._timeout:
            self._end_waiting(now)
        self._publish()

    def _end_waiting(self, now: Register) -> None:
        if now.phase is Phase.OPEN:
            self.membership.wait_no_longer()
        elif now.phase is Phase.RUN and any(i in now.counting for i, _ in self._arrived):
            for replica_group in {i for i, _ in now.clients - self._arrived}:
                self._lose(replica_group, Loss.LATE, f"it did not arrive within {self._timeout:g} s")
