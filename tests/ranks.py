"""The ranks of a pytest that a launcher started: each rank is a process, and all run the same tests."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import pytest

from hpcsgd.comm import Backend, Communicator, PeerLost, joining
from hpcsgd.comm.by_device import ByDevice
from hpcsgd.comm.readers import wait_for_readers


def _from_launcher(*names: str) -> int | None:
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


BY_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
RANKS = _from_launcher(*(["WORLD_SIZE"] if BY_TORCHRUN else ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])) or 1
RANK = _from_launcher(*(["RANK"] if BY_TORCHRUN else ["PMI_RANK", "OMPI_COMM_WORLD_RANK"])) or 0
LAUNCHED = RANKS > 1
GRACE = 10.0  # seconds in which the other ranks must receive a failure before the job is aborted
_STDERR = os.dup(2)  # before pytest captures it
_CALLS = 12  # the number of calls printed for each thread when a test exceeds its time limit


class Outcome(NamedTuple):
    """The result of a function on one rank, or its exception."""

    test: str
    value: Any = None
    error: BaseException | None = None


class Processes:
    """All ranks. Every method that communicates is collective."""

    def __init__(self) -> None:
        self.world = joining.world()
        assert (self.world.rank, self.world.size) == (RANK, RANKS), "the launcher numbers ranks differently"
        self.control = (
            self.world.dup_with_thread()
        )  # separate, so that a failed rank's gather does not pair with the others' collectives

    def run(self, n: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results of `function(world, *args)` on all ranks, or raise the exception of one."""
        assert n == RANKS, f"this world has {RANKS} ranks"
        with splitting(self.world.backend) as made:
            outcomes = self.gather(self.attempt(function, *args))
        tests = sorted({outcome.test for outcome in outcomes})
        assert len(tests) == 1, f"the ranks are in different tests: {', '.join(tests)}"
        if errors := [outcome.error for outcome in outcomes if outcome.error is not None]:
            raise cause(errors)
        for backend in reversed(made):  # an MPI library allows only some two thousand communicators
            free(backend)
        return [outcome.value for outcome in outcomes]

    def attempt(self, function: Callable[..., Any], *args: Any) -> Outcome:
        test = os.environ["PYTEST_CURRENT_TEST"]
        # As with threads, every run counts bytes from zero.
        world = Communicator(
            self.world.backend, timeout=self.world.timeout, comm_thread=self.world.comm_thread
        )
        try:
            value = function(world, *args)
            pickle.dumps(value)
            world.close_dups(self.world.timeout)
        except (Exception, pytest.skip.Exception, pytest.fail.Exception) as error:
            error.add_note(f"\non rank {RANK} of {RANKS}:\n{traceback.format_exc()}")
            return Outcome(test, error=portable(error))
        return Outcome(test, value=value)

    def gather(self, outcome: Outcome) -> list[Outcome]:
        """Return all ranks' outcomes. Abort the job if the others do not receive a failure in time."""
        end = threading.Timer(GRACE, self.abort, [outcome])
        end.daemon = True
        if outcome.error is not None:
            end.start()
        try:
            return self.control.gather_objects(outcome)
        finally:
            end.cancel()

    def abort(self, outcome: Outcome) -> NoReturn:
        message = "".join(traceback.format_exception(outcome.error))
        complain(f"{outcome.test} failed here, the other ranks still wait after {GRACE:g} s:\n{message}")
        wait_for_readers(_STDERR)
        self.world.backend.abort(1)
        os._exit(1)

    def same(self, item: Any) -> Any:
        """Return rank 0's `item` on every rank."""
        return self.control.gather_objects(item)[0]


@contextlib.contextmanager
def splitting(world: Backend) -> Iterator[list[Backend]]:
    """Yield a list to which each communicator that is split off in the block is appended.

    The order is the same on all ranks of a communicator.
    """
    assert isinstance(world, ByDevice)
    made: list[Backend] = []
    kind = type(world.host)
    split = kind.split

    def noted(backend: Backend, color: int, key: int) -> Backend:
        new = split(backend, color, key)
        made.append(new)
        return new

    with mock.patch.object(kind, "split", noted):
        yield made


def free(backend: Any) -> None:
    """Free a communicator that is no longer used; with MPI this is collective."""
    backend.close() if BY_TORCHRUN else backend._comm.Free()


@functools.cache
def processes() -> Processes:
    return Processes()


def cause(errors: list[BaseException]) -> BaseException:
    """Return the error of the lowest rank, if possible one that is not caused by the end of another rank."""
    return next((error for error in errors if not isinstance(error, PeerLost)), errors[0])


def portable(error: BaseException) -> BaseException:
    """Return `error`, or if it cannot be pickled, a `RuntimeError` with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as unpicklable:
        told = RuntimeError(f"{type(error).__name__}: {error} (as such it cannot be pickled: {unpicklable})")
        for note in error.__notes__:
            told.add_note(note)
        return told
    return error


def complain(message: str) -> None:
    """Write a message to the launcher's stderr, which pytest does not capture."""
    os.write(_STDERR, f"[rank {RANK}] {message}\n".encode())


def end_late(test: str, timeout: float) -> NoReturn:
    """Print where each thread is, and end this process and with it the job.

    Each thread gets one line, because a log may keep only its last lines. All ranks reach the time limit at
    about the same time, and the first one that ends also ends the others. So each rank waits before it ends,
    to let the others print theirs. Threads that have moved on until then did not hang for good: the kernel
    may not have let them run.
    """
    kernel = _system_calls()
    places = _places()
    complain(
        f"Timeout: {test} is not through after {timeout:g} s"
        + "".join(
            f"\n  [rank {RANK}] {at[0]} [{kernel.get(tid, '?')}]: {at[1]}" for tid, at in places.items()
        )
    )
    time.sleep(GRACE)
    complain(
        "after the time limit: "
        + "; ".join(
            f"{name} {'is where it was' if (name, place) == places.get(tid) else f'is at {place}'}"
            for tid, (name, place) in _places().items()
        )
    )
    os._exit(1)


def _places() -> dict[int, tuple[str, str]]:
    """Return the name and the place of each thread by the kernel's number of the thread."""
    frames = sys._current_frames()
    return {
        thread.native_id: (thread.name, _place(frames[ident]))
        for thread in threading.enumerate()
        if thread.native_id is not None and (ident := thread.ident) in frames
    }


def _system_calls() -> dict[int, str]:
    """Return for each thread the number and the arguments of the system call that it waits in.

    Threads that have just ended are left out, and all of them where the kernel does not allow to read this.
    """
    found: dict[int, str] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found[int(task.name)] = (task / "syscall").read_text().strip()
    return found


def _place(frame: types.FrameType) -> str:
    """Return the calls of a thread, from the innermost one to the test."""
    calls = traceback.extract_stack(frame)[::-1]
    ours = itertools.takewhile(lambda call: "_pytest" not in call.filename, calls)
    return " < ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in [*ours][:_CALLS])
