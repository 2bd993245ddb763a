"""The ranks of a pytest that was started under a launcher: one process each, all in the same tests."""

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
GRACE = 10.0  # seconds in which the other ranks must learn of a failure before the job is ended
_STDERR = os.dup(2)  # before pytest captures it
_CALLS = 12  # calls of a thread that a test which is late shows


class Outcome(NamedTuple):
    """What became of a function on one rank."""

    test: str
    value: Any = None
    error: BaseException | None = None


class Processes:
    """All ranks; what is called on one has to be called on every other."""

    def __init__(self) -> None:
        self.world = joining.world()
        assert (self.world.rank, self.world.size) == (RANK, RANKS), "the launcher numbers ranks differently"
        self.control = (
            self.world.dup_with_thread()
        )  # a rank that failed must not meet the others' collectives

    def run(self, n: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of `function(world, *args)` on all ranks, or the exception of one of them."""
        assert n == RANKS, f"this world has {RANKS} ranks"
        with splitting(self.world.backend) as made:
            outcomes = self.gather(self.attempt(function, *args))
        tests = sorted({outcome.test for outcome in outcomes})
        assert len(tests) == 1, f"the ranks are in different tests: {', '.join(tests)}"
        if errors := [outcome.error for outcome in outcomes if outcome.error is not None]:
            raise cause(errors)
        for backend in reversed(made):  # an MPI library has some two thousand communicators
            free(backend)
        return [outcome.value for outcome in outcomes]

    def attempt(self, function: Callable[..., Any], *args: Any) -> Outcome:
        test = os.environ["PYTEST_CURRENT_TEST"]
        # As with threads, bytes are counted from zero in every run.
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
        """All ranks' outcomes; a failure that the others do not come to hear of ends the job."""
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
        """Rank 0's `item`, on every rank."""
        return self.control.gather_objects(item)[0]


@contextlib.contextmanager
def splitting(world: Backend) -> Iterator[list[Backend]]:
    """The communicators that are split off meanwhile, in the same order on all their ranks."""
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
    """What nobody uses any more; with MPI on all ranks at once."""
    backend.close() if BY_TORCHRUN else backend._comm.Free()


@functools.cache
def processes() -> Processes:
    return Processes()


def cause(errors: list[BaseException]) -> BaseException:
    """The error of the lowest rank, passing over those that only tell that another rank is gone."""
    return next((error for error in errors if not isinstance(error, PeerLost)), errors[0])


def portable(error: BaseException) -> BaseException:
    """`error`, or what it says where it does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as unpicklable:
        told = RuntimeError(f"{type(error).__name__}: {error} (as such it cannot be pickled: {unpicklable})")
        for note in error.__notes__:
            told.add_note(note)
        return told
    return error


def complain(message: str) -> None:
    """Straight to the launcher's stderr, past pytest's capture."""
    os.write(_STDERR, f"[rank {RANK}] {message}\n".encode())


def end_late(test: str, timeout: float) -> NoReturn:
    """End this process, and with it the job, saying where every thread stands.

    A line for each thread, because only the last lines of a log may be kept. All ranks are late at about the
    same time, and the first to end ends the others, so each gives them a moment to say where they stand.
    """
    frames = sys._current_frames()
    threads = [
        (thread.name, frames[ident]) for thread in threading.enumerate() if (ident := thread.ident) in frames
    ]
    places = "".join(f"\n  [rank {RANK}] {name}: {_place(frame)}" for name, frame in threads)
    complain(f"Timeout: {test} is not through after {timeout:g} s{places}")
    time.sleep(GRACE)
    os._exit(1)


def _place(frame: types.FrameType) -> str:
    """Where a thread stands, innermost first, down to the test."""
    calls = traceback.extract_stack(frame)[::-1]
    ours = itertools.takewhile(lambda call: "_pytest" not in call.filename, calls)
    return " < ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in [*ours][:_CALLS])
