"""A running coordinator and its clients."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import programs
from hpcsgd.elastic.client import Client
from hpcsgd.elastic.coordinator import Coordinator
from hpcsgd.elastic.coordinator_address import CoordinatorAddress
from hpcsgd.elastic.event_log import Event, EventLog, read
from hpcsgd.elastic.journal import TermJournal, claim
from hpcsgd.elastic.register import Phase, Register
from hpcsgd.elastic.resource_budget import ResourceBudget

HEARTBEAT_TIMEOUT = 600.0
"""Seconds; longer than any machine delays a thread, so that no group is lost by accident."""
TOKEN = "of these tests"


class Desk:
    """Coordinators, and clients that are closed when the test ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clients: list[Client] = []
        self.pid = 0
        """The process id of the last coordinator that runs in its own process."""

    @contextmanager
    def coordinator(
        self,
        replica_groups: int,
        *,
        timeout: float = 600,
        quorum: int | None = None,
        grace: float = math.inf,
        late_rounds: int = 0,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        budget: ResourceBudget | None = None,
        term: int | None = None,
    ) -> Iterator[Coordinator]:
        """Serve a coordinator in a thread; it ends when the clients have left.

        With a `term`, claim that term and start the coordinator as for groups that are started separately.
        """
        events = EventLog(self.folder / "events.jsonl")
        if term is not None:
            assert claim(self.folder, term)
        served = Coordinator(
            replica_groups, TOKEN, heartbeat_timeout=heartbeat_timeout, timeout=timeout, events=events,
            quorum=quorum, grace=grace, late_rounds=late_rounds, budget=budget,
            journal=None if term is None else TermJournal(self.folder, term), together=term is None,
        )  # fmt: skip
        thread = threading.Thread(target=lambda: asyncio.run(served.serve("127.0.0.1")))
        thread.start()
        wait_for(lambda: served.address)
        if term is not None:
            CoordinatorAddress(served.address, TOKEN).publish(self.folder, term)
        try:
            yield served
        finally:
            served.membership.register = replace(served.register, phase=Phase.FINISHED)
            self.leave()
            thread.join(60)
            assert not thread.is_alive()
            events.close()

    @contextmanager
    def killable(
        self, replica_groups: int, port: int = 0, heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    ) -> Iterator[str]:
        """Yield the address of a coordinator in its own process, which is killed at the end of the block."""
        told = {
            "replica_groups": replica_groups, "token": TOKEN, "heartbeat_timeout": heartbeat_timeout,
            "timeout": 60,
            "folder": str(self.folder), "host": "127.0.0.1", "port": port,
        }  # fmt: skip
        words = [sys.executable, "-m", "hpcsgd.elastic"]
        with programs.start(words, stdin=programs.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{json.dumps(told)}\n")
            process.stdin.flush()
            self.pid = process.pid
            try:
                yield process.stdout.readline().strip()
            finally:
                process.kill()

    def events(self) -> list[Event]:
        """Return the events of all coordinators so far."""
        return read(self.folder / "events.jsonl")

    def leave(self) -> None:
        for client in self.clients:
            client.close()
        self.clients.clear()

    def client(
        self,
        at: str,
        replica_group: int,
        rank: int = 0,
        ranks: int = 1,
        life: str = "first.1",
        on_change: Callable[[Register | None], None] = lambda _: None,
    ) -> Client:
        hello = {"replica_group": replica_group, "rank": rank, "ranks": ranks, "life": life}
        client = Client(
            at, TOKEN, hello, heartbeat_timeout=HEARTBEAT_TIMEOUT, patience=30, on_change=on_change
        )
        self.clients.append(client)
        return client


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.leave()


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files as with NFS: a missing file stays missing until its folder is listed."""
    absent: set[str] = set()
    here = {name: getattr(module, name) for module, name in ((os, "stat"), (io, "open"), (os, "listdir"))}

    def asked(name: str) -> Callable[..., Any]:
        def ask(path: Any, *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, (str, Path)):
                return here[name](path, *arguments, **options)
            if "wb" not in arguments and str(path) in absent:
                raise FileNotFoundError(path)
            try:
                return here[name](path, *arguments, **options)
            except FileNotFoundError:
                absent.add(str(path))
                raise

        return ask

    def listdir(folder: Any = ".") -> list[str]:
        absent.difference_update({path for path in absent if Path(path).parent == Path(folder)})
        return here["listdir"](folder)

    monkeypatch.setattr(os, "stat", asked("stat"))
    monkeypatch.setattr(io, "open", asked("open"))
    monkeypatch.setattr(os, "listdir", listdir)


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
