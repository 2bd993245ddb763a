"""The coordinator of replica groups that start separately; one of their launchers runs it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from hpcsgd.elastic import event_log
from hpcsgd.elastic.coordinator_address import of_term
from hpcsgd.elastic.event_log import EventLog
from hpcsgd.elastic.journal import FOLDER, last_claimed, newest
from hpcsgd.elastic.register import Phase, Register
from hpcsgd.elastic.watch import beat
from hpcsgd.errors import UserError
from hpcsgd.report.run_folder import replica_group_folder


class CoordinatorElection:
    """The part of each launcher that makes sure that some launcher runs a coordinator.

    If no coordinator has answered for `heartbeat_timeout` seconds, or the last one has left, this launcher
    starts the next one. If several launchers do so, `journal.claim` lets only one coordinator continue.
    `arguments` has the arguments of the coordinator's process; see `hpcsgd.elastic.__main__`.
    """

    def __init__(
        self, folder: Path, replica_group: int, *, heartbeat_timeout: float, host: str, **arguments: Any
    ) -> None:
        self._folder, self._terms = folder, folder / FOLDER
        self.address = str(self._terms.resolve())
        self.token = ""
        self._heartbeat_timeout, self._host = heartbeat_timeout, host
        self._arguments = {
            **arguments,
            "heartbeat_timeout": heartbeat_timeout,
            "host": host,
            "folder": str(folder),
        }
        self._events = EventLog(replica_group_folder(folder, replica_group) / event_log.NAME)
        self._process: asyncio.subprocess.Process | None = None
        self._seen = 0, time.monotonic()
        """The number of the newest term, and when its coordinator last answered or was first noticed."""

    @property
    def has_it(self) -> bool:
        """True if this launcher runs the coordinator."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        while not self._over() and not await self._there():
            await asyncio.sleep(beat(self._heartbeat_timeout) / 4)

    async def keep(self) -> None:
        while True:
            if self._process is not None:
                await self._process.wait()
                self._process = None
            if self._over():
                return
            try:
                await self._there()
            except UserError as error:  # a coordinator of another launcher may succeed
                self._say(str(error))
            await asyncio.sleep(beat(self._heartbeat_timeout))

    def note(self, event: str, **fields: Any) -> None:
        getattr(self._events, event)(**fields)

    def register(self) -> Register:
        return newest(self._terms)

    async def end(self) -> None:
        """End this launcher's coordinator. After the training, first give it time to inform all groups."""
        process = self._process
        if process is not None and self.has_it:
            assert process.stdin is not None
            if self._over():
                await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=self._heartbeat_timeout)
            process.stdin.close()
            await process.wait()
        self._events.close()

    def _over(self) -> bool:
        """Return True if the training is over, so that no coordinator is needed."""
        return self.register().phase is Phase.FINISHED

    async def _there(self) -> bool:
        """Return True if a coordinator answers. Otherwise return False, and start one here if it is due."""
        if not self._terms.exists():
            raise UserError(f"{self._folder}: it has been removed")
        term, now = last_claimed(self._terms), time.monotonic()
        if term > self._seen[0]:
            self._seen = term, now
        found = of_term(self._terms, term)
        if found is not None and found.address and await found.answers(self._heartbeat_timeout):
            self._seen, self.token = (term, time.monotonic()), found.token
            return True
        if term == 0 or (found is not None and not found.address):  # the last coordinator has left
            await self._begin(term + 1)
        elif now - self._seen[1] > self._heartbeat_timeout:
            where = f"number {term}" if found is None else f"at {found.address}"
            self._say(
                f"nothing was heard of the coordinator {where} for {self._heartbeat_timeout:g} s: "
                "the next one begins"
            )
            await self._begin(term + 1)
        return False

    async def _begin(self, term: int) -> None:
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hpcsgd.elastic",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({**self._arguments, "term": term}).encode() + b"\n")
        if not await process.stdout.readline() and await process.wait() != 0:
            raise UserError(f"--host {self._host}: the coordinator that was begun here has ended")

    def _say(self, what: str) -> None:
        print(f"hpcsgd: {what}", file=sys.stderr, flush=True)
