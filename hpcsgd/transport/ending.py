"""How a job of many processes ends: all of its ranks, soon, with one message.

An exception that one rank raises ends every rank through the backend's abort. A `JobError` is raised by
all ranks alike: rank 0 prints it and everybody leaves in good order.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn

from hpcsgd.errors import JobError, UserError
from hpcsgd.transport.backend import PeerLost
from hpcsgd.transport.base import Transport
from hpcsgd.transport.lane import close_lanes

GRACE = 5.0
"""Seconds that ranks leaving together wait for each other before the job is aborted."""


class Ending:
    """Watches over how this process ends; one per process, made by `guard`."""

    def __init__(self, world: Transport) -> None:
        self._world = world
        self._raise_exit = sys.exit
        self._exit_code: object = None

    def install(self) -> None:
        sys.excepthook = self._uncaught
        sys.exit = self._exit
        atexit.register(self._leave)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, JobError):
            if self._world.rank == 0:
                _print(f"hpcsgd: {error}")
            _abort_later(self._world, 1)
            return
        rank = f"rank {self._world.rank}: " if self._world.size > 1 else ""
        time.sleep(_turn(self._world.rank))  # who says so first ends the others before they repeat it
        if isinstance(error, KeyboardInterrupt):
            _print(f"hpcsgd: {rank}interrupted")
            self._abort(130)
        if isinstance(error, (UserError, PeerLost)):
            _print(f"hpcsgd: {rank}{error}")
        else:
            _print(
                f"hpcsgd: {rank}{kind.__name__}\n{''.join(traceback.format_exception(kind, error, trace))}"
            )
        self._abort(1)

    def _exit(self, code: str | int | None = None) -> NoReturn:
        self._exit_code = code
        self._raise_exit(code)

    def _leave(self) -> None:
        """A rank that exits alone with an error takes the others along; calls in flight are waited for."""
        if self._exit_code not in (None, 0):
            self._abort(self._exit_code if isinstance(self._exit_code, int) else 1)
        if not close_lanes(GRACE):
            _print(f"hpcsgd: rank {self._world.rank} leaves with communication in flight")
            self._abort(1)

    def _abort(self, code: int) -> None:
        if self._world.size > 1:
            sys.stdout.flush()
            self._world.backend.abort(code)
            os._exit(code)
        elif code != 1:
            os._exit(code)


_guarded: list[Ending] = []


def guard(world: Transport) -> None:
    """From now on an uncaught exception or a non-zero `sys.exit` on this rank ends every rank of `world`."""
    if not _guarded:
        _guarded.append(Ending(world))
        _guarded[0].install()


def leave_together(code: int) -> NoReturn:
    """End this process with `code`, knowing that every rank of the job does the same."""
    sys.stdout.flush()
    for ending in _guarded:
        ending._exit_code = None
        _abort_later(ending._world, code)
    raise SystemExit(code)


def _abort_later(world: Transport, code: int) -> None:
    """If the others do not come along (MPI's finalize would wait for them), end them."""

    def abort() -> None:
        world.backend.abort(code)

    timer = threading.Timer(GRACE, abort)
    timer.daemon = True
    timer.start()


def _turn(rank: int) -> float:
    """Seconds that this rank lets those before it speak first."""
    return min(1 + 0.3 * rank, 4) if rank else 0.0


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
