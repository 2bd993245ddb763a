"""How a job of many processes ends: all of its ranks end soon, and one message says why.

An exception that one rank raises ends every rank through the backend's abort. If all ranks raise a `JobError`
together, rank 0 prints it, and all ranks leave in good order. A process that the script forks is no rank, and
ends alone.
"""

from __future__ import annotations

import _sitebuiltins
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from types import TracebackType
from typing import NoReturn, Protocol

import torch

from hpcsgd.comm.backend import Backend, PeerLost
from hpcsgd.comm.comm_thread import close_comm_threads
from hpcsgd.comm.communicator import Communicator
from hpcsgd.comm.deadlock import Reports
from hpcsgd.comm.last_words import exit_code, is_loss, last_line, under_way, with_traceback, words
from hpcsgd.comm.rank_watch import RankWatch
from hpcsgd.comm.readers import wait_for_readers
from hpcsgd.comm.script import MainModule
from hpcsgd.errors import JobError, UserError, in_one_line, note_exit_code, print_at_once, tell

GRACE = 5.0
"""Seconds that ranks which leave together wait for each other before the job is aborted."""


class Shutdown:
    """The code that runs when this process ends: a process has one `Shutdown`, which `guard` makes."""

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._parting = world.backend.split(0, world.rank)  # separate from other collectives
        self._parted: _Parting | None = None
        self._telling = threading.Lock()  # if two threads miss the same rank, only one reports it
        self._raise_exit = sys.exit
        self._exit_code: object = None
        self._has_called_exit = False
        self._script = MainModule()
        self._reported: BaseException | None = None
        self._is_child = False
        self._watch: RankWatch | None = None
        self._reports: ClosableReports | None = None

    def watched(self, reports: ClosableReports) -> RankWatch:
        """Return this rank's `RankWatch`, which reports to `reports` what the rank waits for."""
        self._reports, self._watch = reports, RankWatch(self._world.rank, reports)
        return self._watch

    def fail(self, message: str) -> None:
        """Print `message`, which concerns all ranks, and end every rank of the job."""
        with self._telling:
            tell(f"hpcsgd: {message}")
            self._abort(1)

    def install(self) -> None:
        sys.excepthook = self._uncaught
        sys.exit = self._exit
        call = _sitebuiltins.Quitter.__call__  # called by `exit()` and `quit()`

        def leave(quitter: _sitebuiltins.Quitter, code: str | int | None = None) -> NoReturn:
            self._note_exit(code)
            call(quitter, code)

        _sitebuiltins.Quitter.__call__ = leave  # pyright: ignore[reportAttributeAccessIssue]
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._become_child)

    def uncaught(self, error: BaseException) -> None:
        """End the job as if `error` had not been caught, on any thread."""
        self._uncaught(type(error), error, error.__traceback__)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._reported = error
        if self._is_child:
            self._exit_code = exit_code(error)
            sys.__excepthook__(kind, error, trace)
            return
        first = under_way(error)
        if isinstance(error, JobError) and first is None:
            if self._world.rank == 0:
                tell(f"hpcsgd: {error}")
            self.part(1)
            return
        with self._telling:
            code = exit_code(error)
            late = isinstance(error, UserError) or is_loss(error)
            self._wait_for_turn(code, 0 if first else self._world.rank + late)
            try:
                self._tell(error, first)
            finally:
                self._abort(code)

    def _tell(self, error: BaseException, first: BaseException | None) -> None:
        """Print `error`, and the exception `first` that led to it, if there was one."""
        text = words(error)
        if first is not None:
            text = f"{with_traceback(first)}\nhpcsgd: {self._name}{text}"
        to = print_at_once if is_loss(error) and first is None else tell
        to(f"hpcsgd: {self._name}{text}")

    @property
    def _name(self) -> str:
        return f"rank {self._world.rank}: " if self._world.size > 1 else ""

    def _wait_for_turn(self, code: int, turn: int) -> None:
        """Wait, so that the ranks report in order and the first one ends the others before they report, too.

        The TERM signal of `srun -K` may end the others. A rank whose error says why ranks act differently
        reports before one whose error only says that they do.
        """
        if threading.current_thread() is threading.main_thread():  # only the main thread may set a handler
            signal.signal(signal.SIGTERM, lambda signum, frame: _end_at_once(code))
        if self._world.size > 1:
            time.sleep(min(1.2 * turn, 4.8))

    def part(self, code: int) -> None:
        """End together with all other ranks; if one of them does not end in time, abort the job with `code`.

        MPI would wait for that rank at the very end of this process, when nothing else can act.
        """
        # `srun -K` sends this signal to ranks that leave after the first
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._exit_code = None
        note_exit_code(code)
        _flush()
        if self._world.size > 1:
            self._parted = _Parting(self._parting, code)

    def _exit(self, code: str | int | None = None) -> NoReturn:
        self._note_exit(code)
        self._raise_exit(code)

    def _note_exit(self, code: object) -> None:
        if threading.current_thread() is threading.main_thread():  # another thread ends only itself
            self._exit_code, self._has_called_exit = code, True

    def _left_by(self) -> str:
        return "" if self._has_called_exit else self._script.left_by

    def _become_child(self) -> None:
        self._is_child = True
        self._exit_code, self._has_called_exit = None, False

    def _leave_as_child(self, code: int) -> NoReturn:
        """End a forked process before MPI's exit handler runs, which would end what belongs to the parent."""
        if early := self._left_by():
            print_at_once(f"hpcsgd: a forked process has ended by {early}: end it by sys.exit or os._exit")
            code = 1
        _flush()
        os._exit(code)

    def _leave(self) -> None:
        """End this process after calls in progress. If it exits with an error, end all other ranks, too."""
        if self._script.is_complete:  # sys.exit was called, but the script caught it
            self._exit_code = None
        code = 0 if self._exit_code is None else self._exit_code if isinstance(self._exit_code, int) else 1
        if self._is_child:
            self._leave_as_child(code)
        if code:
            self._abort(code)
        uncaught = self._script.uncaught()
        if uncaught is not None and uncaught is not self._reported and self._world.size > 1:
            self._end_as_printed(uncaught)
        if self._watch is not None:
            self._watch.leaving = True
            self._watch.last = " and ".join(filter(None, [self._watch.last, self._left_by()]))
        try:
            closed = close_comm_threads(GRACE)
        except PeerLost as error:  # another rank might still have sent a request to this one
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

    def _end_as_printed(self, error: BaseException) -> None:
        """End the other ranks after `error`, which the script's own hook has printed on this rank only."""
        if isinstance(error, JobError):
            self._uncaught(JobError, error, error.__traceback__)
            return
        code = exit_code(error)
        self._wait_for_turn(code, self._world.rank)
        tell(f"hpcsgd: {self._name}{in_one_line(last_line(error))}")
        self._abort(code)

    def _abort(self, code: int) -> None:
        """End all ranks with `code`, or with 1 if the lowest byte of `code`, which the system keeps, is 0."""
        code = code % 256 or 1
        note_exit_code(code)
        if self._world.size > 1:
            _flush()
            wait_for_readers(1, 2)
            self._world.backend.abort(code)
            os._exit(code)


class ClosableReports(Reports, Protocol):
    """`Reports` that travel by a library, and must be closed after the last report."""

    def close(self, timeout: float) -> None: ...


class _Parting:
    """A barrier at which all ranks of `backend` leave together: an allreduce on a daemon thread of each."""

    def __init__(self, backend: Backend, code: int) -> None:
        self.code = code
        # aborts the job if this process hangs before it ends
        self._too_long = threading.Timer(1.5 * GRACE, backend.abort, [code])
        self._barrier = threading.Thread(target=backend.allreduce, args=(torch.zeros(1), "sum"), daemon=True)
        self._too_long.daemon = True
        self._too_long.start()
        self._barrier.start()

    def complete(self) -> bool:
        """Wait for the other ranks, and return True if they come in time."""
        self._barrier.join(GRACE)
        self._too_long.cancel()
        return not self._barrier.is_alive()


class Library(Protocol):
    """A library with its own threads or devices, which must end before the process does."""

    def close(self) -> None: ...


_libraries: weakref.WeakSet[Library] = weakref.WeakSet()


def close_at_the_end(library: Library) -> None:
    """Close `library` when all communication threads have ended; a weak reference is kept."""
    _libraries.add(library)


def close_libraries() -> None:
    """Close all libraries that still exist."""
    for library in list(_libraries):
        library.close()


_guarded: list[Shutdown] = []


def guard(world: Communicator) -> Shutdown | None:
    """From now on, end every rank after an uncaught exception or non-zero `sys.exit` on this rank.

    Returns:
        The object that ends the ranks; None if this process has been guarded before.
    """
    if _guarded:
        return None
    _guarded.append(Shutdown(world))
    _guarded[0].install()
    return _guarded[0]


def exit_all(code: int) -> NoReturn:
    """End this process with `code`. Every rank of the job must call this."""
    for ending in _guarded:
        ending.part(code)
    raise SystemExit(code)


def end_by(error: BaseException) -> None:
    """End the job as if `error` had not been caught, on any thread, even if the script has its own hook."""
    for ending in _guarded:
        ending.uncaught(error)
    if not _guarded:
        sys.excepthook(type(error), error, error.__traceback__)


def _end_at_once(code: int) -> NoReturn:
    """End this process with `code`, as a launcher demands before this rank has reported its error."""
    note_exit_code(code)
    os._exit(code)


def _flush() -> None:
    """Flush stdout, unless the script has closed or replaced it."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
