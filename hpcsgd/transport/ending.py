"""How a job of many processes ends: all of its ranks, soon, with one message.

An exception that one rank raises ends every rank through the backend's abort. A `JobError` is raised by
all ranks alike: rank 0 prints it and everybody leaves in good order.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import signal
import stat
import sys
import termios
import threading
import time
import traceback
import weakref
from types import TracebackType
from typing import NoReturn, Protocol

import torch

from hpcsgd.errors import PEER_LOST, JobError, UserError, in_one_line, print_at_once, tell
from hpcsgd.transport.backend import Backend, PeerLost, first_line
from hpcsgd.transport.base import Transport
from hpcsgd.transport.deadlock import Reports
from hpcsgd.transport.lane import close_lanes
from hpcsgd.transport.rank_watch import RankWatch

GRACE = 5.0
"""Seconds that ranks leaving together wait for each other before the job is aborted."""
LOST = ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out", "ncclRemoteError")
"""What torch's libraries say of a rank that is gone, among errors that are the script's own."""
LISTENED = 1.0
"""Seconds that a launcher has to read what was printed, at most."""


class Ending:
    """Watches over how this process ends; one per process, made by `guard`."""

    def __init__(self, world: Transport) -> None:
        self._world = world
        self._parting = world.backend.split(0, world.rank)  # who parts must not meet the others' collectives
        self._parted: _Parting | None = None
        self._telling = threading.Lock()  # two threads may miss the same rank: one says so
        self._raise_exit = sys.exit
        self._exit_code: object = None
        self._watch: RankWatch | None = None
        self._reports: ClosableReports | None = None

    def watched(self, reports: ClosableReports) -> RankWatch:
        """Return a watch which reports what this rank waits for, until it leaves."""
        self._reports, self._watch = reports, RankWatch(self._world.rank, reports)
        return self._watch

    def fail(self, message: str) -> None:
        """End every rank of the job with this line, which is about all of them."""
        with self._telling:
            tell(f"hpcsgd: {message}")
            self._abort(1)

    def install(self) -> None:
        sys.excepthook = self._uncaught
        sys.exit = self._exit
        atexit.register(self._leave)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, JobError):
            if self._world.rank == 0:
                tell(f"hpcsgd: {error}")
            self.part(1)
            return
        with self._telling:
            self._tell_and_abort(kind, error, trace)

    def _tell_and_abort(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        rank = f"rank {self._world.rank}: " if self._world.size > 1 else ""
        code = _exit_code(error)
        self._wait_for_turn(code)
        if isinstance(error, KeyboardInterrupt):
            tell(f"hpcsgd: {rank}interrupted")
        elif _is_loss(error):
            print_at_once(f"hpcsgd: {rank}{first_line(error)}")
        elif isinstance(error, UserError):
            tell(f"hpcsgd: {rank}{in_one_line(error)}")
        else:
            tell(f"hpcsgd: {rank}{kind.__name__}\n{''.join(traceback.format_exception(kind, error, trace))}")
        self._abort(code)

    def _wait_for_turn(self, code: int) -> None:
        """Who says so first ends the others before they repeat it, if by the TERM of `srun -K`."""
        if threading.current_thread() is threading.main_thread():  # no other one may
            signal.signal(signal.SIGTERM, lambda signum, frame: os._exit(code))
        time.sleep(min(1.2 * self._world.rank, 4.8))

    def part(self, code: int) -> None:
        """Leave in good order with all others. Where one does not come the job is aborted with `code`: MPI
        would wait for it as the last thing this process does, when nothing can be done any more."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of `srun -K` to whoever leaves after the first
        self._exit_code = None
        sys.stdout.flush()
        if self._world.size > 1:
            self._parted = _Parting(self._parting, code)

    def _exit(self, code: str | int | None = None) -> NoReturn:
        self._exit_code = code
        self._raise_exit(code)

    def _leave(self) -> None:
        """A rank that exits alone with an error takes the others along; calls in flight are waited for."""
        if self._exit_code not in (None, 0):
            self._abort(self._exit_code if isinstance(self._exit_code, int) else 1)
        if self._watch is not None:
            self._watch.leaving = True
        try:
            closed = close_lanes(GRACE)
        except PeerLost as error:  # somebody might still have asked this rank
            self._uncaught(PeerLost, error, None)
            return
        if not closed:
            print_at_once(f"hpcsgd: rank {self._world.rank} leaves with communication in flight")
            self._abort(1)
        if self._watch is not None:
            self._watch.left()
        close_libraries()
        if self._parted is not None and not self._parted.complete():
            self._abort(self._parted.code)
        if self._reports is not None:
            self._reports.close(self._world.timeout)

    def _abort(self, code: int) -> None:
        if self._world.size > 1:
            sys.stdout.flush()
            wait_for_readers(1, 2)
            self._world.backend.abort(code)
            os._exit(code)


class ClosableReports(Reports, Protocol):
    """Reports that travel by a library, which has to be told that there are no more."""

    def close(self, timeout: float) -> None: ...


class _Parting:
    """All ranks of `backend` meet a last time, each on a thread of its own until its process ends."""

    def __init__(self, backend: Backend, code: int) -> None:
        self.code = code
        self._too_long = threading.Timer(1.5 * GRACE, backend.abort, [code])  # if we do not get to the end
        self._meeting = threading.Thread(target=backend.allreduce, args=(torch.zeros(1), "sum"), daemon=True)
        self._too_long.daemon = True
        self._too_long.start()
        self._meeting.start()

    def complete(self) -> bool:
        """Whether the others come in time, too."""
        self._meeting.join(GRACE)
        self._too_long.cancel()
        return not self._meeting.is_alive()


class Library(Protocol):
    """What has threads or devices of its own, which must end before the process does."""

    def close(self) -> None: ...


_libraries: weakref.WeakSet[Library] = weakref.WeakSet()


def close_at_the_end(library: Library) -> None:
    """Close it when all lanes have ended; nobody need keep it for that."""
    _libraries.add(library)


def close_libraries() -> None:
    """All that are still there."""
    for library in list(_libraries):
        library.close()


_guarded: list[Ending] = []


def guard(world: Transport) -> Ending | None:
    """From now on an uncaught exception or a non-zero `sys.exit` on this rank ends every rank of `world`.

    Returns:
        How it does; None if this process has been guarded before.
    """
    if _guarded:
        return None
    _guarded.append(Ending(world))
    _guarded[0].install()
    return _guarded[0]


def leave_together(code: int) -> NoReturn:
    """End this process with `code`, knowing that every rank of the job does the same."""
    for ending in _guarded:
        ending.part(code)
    raise SystemExit(code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    return PEER_LOST if _is_loss(error) else 1


def _is_loss(error: BaseException) -> bool:
    """Whether another rank went away or does not answer, in our communication or in torch's own."""
    dist = sys.modules.get("torch.distributed")
    if isinstance(error, PeerLost) or dist is None or not dist.is_available():
        return isinstance(error, PeerLost)
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    by_torch = isinstance(error, dist.DistBackendError) or "/gloo/transport/" in str(error)
    return by_torch and any(words in str(error) for words in LOST)


def wait_for_readers(*files: int) -> None:
    """A launcher that hears of an abort may not care any more for what it was to print."""
    deadline = time.monotonic() + LISTENED
    while any(_unread(file) for file in files) and time.monotonic() < deadline:
        time.sleep(1e-3)


def _unread(file: int) -> bool:
    """Whether `file` is a pipe with something in it."""
    try:
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            return any(fcntl.ioctl(file, termios.FIONREAD, bytes(4)))
    except OSError:  # it is closed
        pass
    return False
