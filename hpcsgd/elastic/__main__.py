"""`python -m hpcsgd.elastic`: the coordinator as a separate process, which ends with its launcher.

The first line of its standard input is JSON with the arguments of `Coordinator`. Each further line is an
event that the launcher adds to the event log. The first line of the process's output is its address. The
process ends when its input ends; it ignores signals, which are for the processes that train.

With the argument `term` it is the coordinator of replica groups that were started separately. If another
process has claimed that term, this process ends without output. Otherwise it also ends when there is a later
coordinator, or when the training has ended and all groups have left.
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

from hpcsgd.elastic.coordinator import Coordinator
from hpcsgd.elastic.coordinator_address import CoordinatorAddress, token_for
from hpcsgd.elastic.event_log import NAME, EventLog
from hpcsgd.elastic.journal import FOLDER, REGISTER, FileJournal, TermJournal, claim
from hpcsgd.elastic.resource_budget import ResourceBudget
from hpcsgd.errors import UserError, in_one_line


async def _together(folder: Path, token: str, host: str, port: int, **arguments: Any) -> None:
    with EventLog(folder / NAME) as events:
        at = Coordinator(token=token, journal=FileJournal(folder / REGISTER), events=events, **arguments)
        left, _ = await _listening(at, host, port, events)
        print(at.address, flush=True)
        await left


async def _apart(folder: Path, term: int, host: str, **arguments: Any) -> None:
    terms = folder / FOLDER
    if not claim(terms, term):
        return
    token = token_for(terms, term)
    with EventLog(terms / str(term) / NAME) as events:
        at = Coordinator(
            token=token, journal=TermJournal(terms, term), events=events, together=False, **arguments
        )
        left, serving = await _listening(at, host, 0, events)
        CoordinatorAddress(at.address, token).publish(terms, term)
        print(at.address, flush=True)
        await asyncio.wait({left, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not at.superseded:
            CoordinatorAddress("", token).publish(terms, term)


async def _listening(
    at: Coordinator, host: str, port: int, events: EventLog
) -> tuple[asyncio.Task[Any], asyncio.Task[None]]:
    """Return two tasks once `at` listens: one ends with the launcher, one after the last client left."""
    serving = asyncio.create_task(at.serve(host, port))
    while not at.address:
        if serving.done():
            serving.result()  # raises the reason why the server cannot listen
        await asyncio.sleep(0.01)
    left = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_hear, args=(loop, events, left), daemon=True).start()
    return asyncio.create_task(left.wait()), serving


def _hear(loop: asyncio.AbstractEventLoop, events: EventLog, left: asyncio.Event) -> None:
    for line in sys.stdin:
        event = json.loads(line)
        loop.call_soon_threadsafe(lambda event=event: getattr(events, event.pop("event"))(**event))
    loop.call_soon_threadsafe(left.set)


def _main() -> None:
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    arguments = json.loads(sys.stdin.readline())
    arguments["folder"] = Path(arguments["folder"])
    budget = arguments.pop("budget", None)
    arguments["budget"] = None if budget is None else ResourceBudget(**budget)
    try:
        asyncio.run(_apart(**arguments) if "term" in arguments else _together(**arguments))
    except (UserError, OSError) as error:
        sys.exit(f"hpcsgd: the coordinator: {in_one_line(error)}")


if __name__ == "__main__":
    _main()
