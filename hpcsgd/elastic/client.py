"""A rank's client at the coordinator: a thread that beats and listens while the rank computes."""

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
from hpcsgd.elastic.handshake import COORDINATOR, Unwelcome, introduce
from hpcsgd.elastic.register import Phase, Register, Vote
from hpcsgd.elastic.watch import Watch, beat

log = logging.getLogger(__name__)


NOTHING = Register()
"""Heard so far."""


class Evicted(Exception):
    """The others have gone on without this island; it may come back as a new life."""


class Client:
    """The connection of one rank of one life of an island.

    A broken connection is made again for `patience` seconds, for the coordinator may be started again; what
    was said last is then said once more. `on_change` is called, by the listening thread, with every new
    register and when the island is evicted (None).
    """

    def __init__(
        self,
        coordinator: str,
        token: str,
        hello: Mapping[str, Any],
        *,
        silence: float,
        patience: float,
        on_change: Callable[[Register | None], None],
    ) -> None:
        """`coordinator`: host:port, or the folder that says where it is; see `whereabouts`. `hello`: island,
        rank, ranks, life."""
        self._coordinator = coordinator
        self._token, self._hello = token, dict(hello)
        self._heartbeat_timeout, self._patience = silence, patience
        self._beat = beat(silence)
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
        with self._news:  # what was before this life is not for it
            self._news.wait_for(lambda: self._ended is not None or self._register is not NOTHING)

    @property
    def register(self) -> Register:
        """As last heard. Raises `Evicted`, or `PeerLost` where the coordinator is gone or other processes are
        this island now."""
        with self._news:
            if self._ended is not None:
                raise self._ended
            return self._register

    @property
    def last(self) -> Register:
        """As last heard, whatever has happened since."""
        return self._register

    @property
    def ended(self) -> bool:
        """Whether nothing more will be heard."""
        return self._ended is not None

    def complete_since(self, generation: int, rounds: int) -> float | None:
        """When, on the clock `time.monotonic`, all ranks of all members were at that meeting."""
        *meeting, moment = self._complete
        return moment if meeting == [generation, rounds] else None

    def come(self, address: str, rounds: int) -> Register:
        """Ask to average, listening at `address` and holding the mean of `rounds`; the register of the
        generation that this rank's island is in, which may have ended meanwhile."""
        replica_group = self._hello["replica_group"]
        last = self.register.generation
        while True:
            self._say({"do": "come", "address": address, "rounds": rounds, "generation": last})
            now = self._wait(lambda now, last=last: now.phase is Phase.FINISHED or now.generation > last)
            if now.phase is Phase.FINISHED or replica_group in now.replica_groups:
                return now
            last = now.generation  # not what is heard by now: a generation with this island may have begun

    def arrive(self, generation: int, rounds: int) -> None:
        """This rank is at the meeting; from here on the coordinator counts the seconds for the others."""
        self._say({"do": "arrive", "generation": generation, "rounds": rounds})

    def vote(
        self, generation: int, rounds: int, ballot: Vote, progress: float = 0.0, pace: float = 0.0
    ) -> Register:
        """This rank holds the whole mean, has come so far, in epochs, and computes a step in `pace` seconds,
        if it knows; what the register says once the round has ended, well or not."""
        said = {**asdict(ballot), "progress": progress, "pace": pace}
        self._say({"do": "vote", "generation": generation, "rounds": rounds, **said})
        return self._outcome(generation, rounds)

    def object(self, generation: int, rounds: int, why: str, blamed: int | None) -> Register:
        """This rank cannot finish the round, perhaps for another island's fault; what the register says once
        it has ended."""
        said = {"why": why, "blamed": blamed}
        self._say({"do": "object", "generation": generation, "rounds": rounds, **said})
        return self._outcome(generation, rounds)

    def move(self) -> None:
        """This island leaves, to come back with other ranks; heard when this returns."""
        self._say({"do": "move"})
        self._wait(lambda _: self._moved)

    def finish(self, generation: int) -> None:
        """All is done and saved."""
        self._say({"do": "finish", "generation": generation})
        self._wait(lambda after: after.phase is Phase.FINISHED)

    def close(self) -> None:
        """Leave."""
        self._closed = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _outcome(self, generation: int, rounds: int) -> Register:
        under_way = Phase.RUN, generation, rounds
        return self._wait(lambda now: (now.phase, now.generation, now.rounds) != under_way)

    def _wait(self, settled: Callable[[Register], bool]) -> Register:
        with self._news:
            self._news.wait_for(lambda: self._ended is not None or settled(self._register))
        self._standing = None  # it has been answered
        return self.register

    def _say(self, message: Mapping[str, Any]) -> None:
        """Said again on a new connection, until something else is."""
        self._standing = message
        with suppress(OSError):  # the listening thread notices, too, and connects again
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
                if isinstance(error, Unwelcome) and not coordinator_address.moves(self._coordinator):
                    raise  # or else somebody has the port of one that has left, and the next one is due
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
            except (Evicted, PeerLost) as told:
                self._end(told)
                return
            try:
                self._connection.close()
                self._connection = self._connect()
                if self._standing is not None:
                    self._send(self._standing)
            except (PeerLost, Unwelcome) as lost:
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

    def _understand(self, said: Mapping[str, Any]) -> None:
        if "evicted" in said:
            raise (PeerLost if said["for_good"] else Evicted)(said["evicted"])
        if "all_arrived" in said:
            self._complete = *said["all_arrived"], time.monotonic()
        if "moved" in said:
            with self._news:
                self._moved = True
                self._news.notify_all()
        if "register" in said:
            now = Register.from_json(said["register"])
            with self._news:
                self._register = now
                self._news.notify_all()
            self._on_change(now)

    def _end(self, why: Exception) -> None:
        with self._news:
            self._ended = why
            self._news.notify_all()
        self._on_change(None)
