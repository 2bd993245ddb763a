"""`python -m hpcsgd.islands`: the coordinator as a process of its own, which ends with whoever started it.

Its standard input is a line of JSON with what `Coordinator` is to be told, then a line for every event that
the launcher has to add to the event log; when that ends, so does this, and not before: signals to the whole
job are for those that train. The first line that it prints is where it listens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from hpcsgd.islands.allotment import Allotment
from hpcsgd.islands.coordinator import Coordinator
from hpcsgd.islands.event_log import EventLog


async def _serve(
    events: EventLog,
    islands: int,
    token: str,
    silence: float,
    timeout: float,
    folder: str,
    host: str,
    port: int,
    allotment: dict[str, Any] | None = None,
) -> None:
    limits = {"silence": silence, "timeout": timeout}
    allots = None if allotment is None else Allotment(**allotment)
    journal = Path(folder) / "register.json"
    at = Coordinator(islands, token, journal=journal, events=events, allotment=allots, **limits)
    serving = asyncio.create_task(at.serve(host, port))
    while not at.address:
        if serving.done():
            serving.result()  # nobody can listen there
        await asyncio.sleep(0.01)
    print(at.address, flush=True)
    left = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_hear, args=(loop, events, left), daemon=True).start()
    await left.wait()


def _hear(loop: asyncio.AbstractEventLoop, events: EventLog, left: asyncio.Event) -> None:
    for line in sys.stdin:
        said = json.loads(line)
        loop.call_soon_threadsafe(lambda said=said: getattr(events, said.pop("event"))(**said))
    loop.call_soon_threadsafe(left.set)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    told = json.loads(sys.stdin.readline())
    with EventLog(Path(told["folder"]) / "events.jsonl") as events:
        asyncio.run(_serve(events, **told))
