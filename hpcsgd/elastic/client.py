"""A rank's connection to the coordinator, on which a thread sends heartbeats and receives messages."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hpcsgd.comm import PeerLost
from hpcsgd.elastic import coordinator_address
from hpcsgd.elastic.handshake import COORDINATOR, Unauthenticated, introduce
from hpcsgd.elastic.register import Phase, Register, Vote
from hpcsgd.elastic.watch import Watch, beat

log = logging.getLogger(__name__)


NOTHING = Register()
"""The register that a client has before the coordinator has sent one."""


class Evicted(Exception):
    """The error if the other groups have continued without this replica group, which may join again."""


class Client:
    """The connection of one rank to the coordinator, for one life of its replica group.

    A life is one stay of a replica group in the run. If the connection breaks, the client tries to reconnect
    for `patience` seconds, because the coordinator may be restarted, and then repeats its last message. The
    listening thread calls `on_change` with every new register, and with None when the connection has ended
    for good, for example because the replica group was evicted.
    """

    def __init__(
        self,
        coordinator: str,
        token: str,
        hello: Mapping[str, Any],
        *,
        heartbeat_timeout: float,
        patience: float,
        on_change: Callable[[Register | None], None],
    ) -> None:
        """Connect to `coordinator`: host:port, or a folder as in `coordinator_address`.

        `hello`: identifies the rank. Its keys are replica_group, rank, ranks (of the group) and life.
        """
        self._coordinator = coordinator
        self._token, self._hello = token, dict(hello)
        self._heartbeat_timeout, self._patience = heartbeat_timeout, patience
        self._beat = beat(heartbeat_timeout)
        self._on_change = on_change
        self._standing: Mapping[str, Any] | None = None
        self._register = NOTHING
        self._complete = (0, 0, 0.0)
        self._moved = False
        self._ended: Exception | None = None
        self._news = threading.Condition()
        self._sending = threading.Lock()
        self._closed = False
        self._connection = self._connect()
        self._thread = threading.Thread(target=self._listen, name="client", daemon=True)
        self._thread.start()
        with self._news:  # registers before this connection are about earlier lives
            self._news.wait_for(lambda: self._ended is not None or self._register is not NOTHING)

    @property
    def register(self) -> Register:
        """The latest register.

        Raises `Evicted` if the other groups have continued without this one. Raises `PeerLost` if the
        coordinator is gone, or if newer processes run this replica group now.
        """
        with self._news:
            if self._ended is not None:
                raise self._ended
            return self._register

    @property
    def last(self) -> Register:
        """The latest register, even if the connection has ended since."""
        return self._register

    @property
    def ended(self) -> bool:
        """True if the connection has ended for good, so that `register` raises an error."""
        return self._ended is not None

    def complete_since(self, generation: int, rounds: int) -> float | None:
        """Return the `time.monotonic` at which all ranks of all members had arrived at this round, or None.

        None means that some have not arrived yet.
        """
        *of_round, moment = self._complete
        return moment if of_round == [generation, rounds] else None

    def come(self, address: str, rounds: int, *, brings: bool = False) -> Register:
        """Ask to join the groups that average, and wait for a new generation with this replica group.

        This rank listens at `address` and has the mean of the first `rounds` rounds. `brings`: it has trained
        since, and no round has counted that. Return the register of the new generation, which may already
        have ended, or the register of the finished training.
        """
        replica_group = self._hello["replica_group"]
        last = self.register.generation
        while True:
            self._send_until_answered(
                {"do": "come", "address": address, "rounds": rounds, "brings": brings, "generation": last}
            )
            now = self._wait(lambda now, last=last: now.phase is Phase.FINISHED or now.generation > last)
            if now.phase is Phase.FINISHED or replica_group in now.replica_groups:
                return now
            # not the generation of the latest register, which may already include this replica group
            last = now.generation

    def arrive(self, generation: int, rounds: int) -> None:
        """Report that this rank is ready to average in the round after `rounds` committed rounds.

        From the first such report on, the coordinator limits how long groups wait for each other.
        """
        self._send_until_answered({"do": "arrive", "generation": generation, "rounds": rounds})

    def vote(
        self, generation: int, rounds: int, ballot: Vote, progress: float = 0.0, pace: float = 0.0
    ) -> Register:
        """Report that this rank has the whole mean; return the register once the round has ended.

        The register shows whether the round was committed. `progress` is the training's progress in epochs.
        `pace` is the seconds that this rank computes per step, 0 if unknown.
        """
        message = {**asdict(ballot), "progress": progress, "pace": pace}
        self._send_until_answered({"do": "vote", "generation": generation, "rounds": rounds, **message})
        return self.outcome(generation, rounds)

    def object(self, generation: int, rounds: int, why: str, blamed: int | None) -> Register:
        """Report that this rank cannot finish the round; return the register once the round has ended.

        `blamed` is the replica group at fault, if it is another one.
        """
        message = {"why": why, "blamed": blamed}
        self._send_until_answered({"do": "object", "generation": generation, "rounds": rounds, **message})
        return self.outcome(generation, rounds)

    def outcome(self, generation: int, rounds: int) -> Register:
        """Return the register once the round after `rounds` committed rounds has ended."""
        under_way = Phase.RUN, generation, rounds
        return self._wait(lambda now: (now.phase, now.generation, now.rounds) != under_way)

    def move(self) -> None:
        """Report that this group leaves to return with more or fewer ranks; wait for the acknowledgement."""
        self._send_until_answered({"do": "move"})
        self._wait(lambda _: self._moved)

    def finish(self, generation: int) -> None:
        """Report that the training is done and saved; wait until the register says so."""
        self._send_until_answered({"do": "finish", "generation": generation})
        self._wait(lambda after: after.phase is Phase.FINISHED)

    def close(self) -> None:
        """End the listening thread and close the connection."""
        self._closed = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _wait(self, settled: Callable[[Register], bool]) -> Register:
        with self._news:
            self._news.wait_for(lambda: self._ended is not None or settled(self._register))
        self._standing = None  # the message has been answered
        return self.register

    def _send_until_answered(self, message: Mapping[str, Any]) -> None:
        """Send `message`. The listening thread repeats it after each reconnection until it is answered."""
        self._standing = message
        with suppress(OSError):  # the listening thread notices the broken connection, too, and reconnects
            self._send(message)

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._sending:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _connect(self) -> socket.socket:
        until = time.monotonic() + self._patience
        while True:
            try:
                return self._connect_once()
            except OSError as error:
                if isinstance(error, Unauthenticated) and not coordinator_address.moves(self._coordinator):
                    # If the coordinator moves, another process may have its old port, and the next
                    # coordinator will start soon.
                    raise
                if time.monotonic() > until or self._closed:
                    raise PeerLost(
                        f"no coordinator at {self._coordinator} for {self._patience:g} s: {error}"
                    ) from error
                time.sleep(self._beat / 4)

    def _connect_once(self) -> socket.socket:
        host, port = coordinator_address.address(self._coordinator).rsplit(":", 1)
        connection = socket.create_connection((host, int(port)), timeout=self._heartbeat_timeout)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            introduce(connection, self._token, COORDINATOR)
            connection.sendall(json.dumps(self._hello).encode() + b"\n")
        except OSError:
            connection.close()
            raise
        connection.settimeout(self._beat)
        return connection

    def _listen(self) -> None:
        while not self._closed:
            try:
                self._hear_until_it_breaks()
            except OSError as error:
                if self._closed:
                    return
                log.debug("the coordinator is lost: %s", error)
            except (Evicted, PeerLost) as reported:
                self._end(reported)
                return
            try:
                self._connection.close()
                self._connection = self._connect()
                if self._standing is not None:
                    self._send(self._standing)
            except (PeerLost, Unauthenticated) as lost:
                self._end(lost)
                return
            except OSError:
                continue

    def _hear_until_it_breaks(self) -> None:
        watch, beaten = Watch(2 * self._beat), time.monotonic()
        heard = watch.look()
        rest = b""
        while True:
            if time.monotonic() - beaten >= self._beat:
                self._send({"do": "beat"})
                beaten = time.monotonic()
            try:
                more = self._connection.recv(65536)
            except TimeoutError:
                if watch.look() - heard > self._heartbeat_timeout:
                    raise ConnectionError(f"silent for {self._heartbeat_timeout:g} s") from None
                continue
            if not more:
                raise ConnectionError("it closed the connection")
            heard = watch.look()
            *lines, rest = (rest + more).split(b"\n")
            for line in lines:
                self._understand(json.loads(line))

    def _understand(self, message: Mapping[str, Any]) -> None:
        if "evicted" in message:
            raise (PeerLost if message["for_good"] else Evicted)(message["evicted"])
        if "all_arrived" in message:
            self._complete = *message["all_arrived"], time.monotonic()
        if "moved" in message:
            with self._news:
                self._moved = True
                self._news.notify_all()
        if "register" in message:
            now = Register.from_json(message["register"])
            with self._news:
                self._register = now
                self._news.notify_all()
            self._on_change(now)

    def _end(self, why: Exception) -> None:
        with self._news:
            self._ended = why
            self._news.notify_all()
        self._on_change(None)
