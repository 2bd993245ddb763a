"""Run the coordinator of elastic groups as a child process of the launcher, restarted if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from hpcsgd.elastic.journal import REGISTER, FileJournal
from hpcsgd.elastic.register import Register
from hpcsgd.errors import UserError

PAUSE = 0.5
"""Seconds between the death of a coordinator and the start of the next one."""


class CoordinatorProcess:
    """The coordinator's process. For its `arguments`, see `hpcsgd.elastic.__main__`."""

    def __init__(self, **arguments: Any) -> None:
        self.address = ""
        self.token = str(arguments["token"])
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None

    async def keep(self) -> None:
        """Keep the process running until `end` is called."""
        while True:
            await self.start()
            assert self._process is not None
            if await self._process.wait() == 0:
                return
            print("hpcsgd: the coordinator died and is started again", file=sys.stderr, flush=True)
            await asyncio.sleep(PAUSE)

    async def start(self) -> None:
        """Start the process if it does not run. After the first time, use the port that groups know."""
        if self._process is not None and self._process.returncode is None:
            return
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hpcsgd.elastic",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._say(self._arguments)
        assert self._process.stdout is not None
        self.address = (await self._process.stdout.readline()).decode().strip()
        if not self.address:
            raise UserError(f"no coordinator can listen on {self._arguments['host']}")
        self._arguments["port"] = int(self.address.rsplit(":", 1)[1])

    def note(self, event: str, **fields: Any) -> None:
        """Write an event to the event log."""
        self._say({"event": event, **fields})

    def register(self) -> Register:
        """Return the register as it was last saved."""
        return FileJournal(Path(self._arguments["folder"]) / REGISTER).load()

    async def end(self) -> None:
        """End the process by closing its input."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()

    def _say(self, what: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
