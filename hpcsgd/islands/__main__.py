"""`python -m hpcsgd.islands`: the coordinator as a process of its own, which ends with whoever started it.

Its standard input is a line of JSON with what `Coordinator` is to be told, then a line for every event that
the launcher has to add to the chronicle; when that ends, so does this. The first line that it prints is where
it listens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from pathlib import Path

from hpcsgd.islands.chronicle import Chronicle
from hpcsgd.islands.coordinator import Coordinator


async def _serve(
    islands: int, token: str, silence: float, timeout: float, folder: str, host: str, port: int
) -> None:
    with Chronicle(Path(folder) / "events.jsonl") as chronicle:
        at = Coordinator(
            islands, token, silence=silence, timeout=timeout, journal=Path(folder) / "register.json",
            chronicle=chronicle,
        )  # fmt: skip
        serving = asyncio.create_task(at.serve(host, port))
        while not at.address and not serving.done():
            await asyncio.sleep(0.01)
        print(at.address, flush=True)
        threading.Thread(target=_listen, args=(asyncio.get_running_loop(), chronicle), daemon=True).start()
        await serving


def _listen(loop: asyncio.AbstractEventLoop, chronicle: Chronicle) -> None:
    for line in sys.stdin:
        said = json.loads(line)
        loop.call_soon_threadsafe(lambda said=said: getattr(chronicle, said.pop("event"))(**said))
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    asyncio.run(_serve(**json.loads(sys.stdin.readline())))
