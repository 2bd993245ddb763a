"""How a command tells the user what is wrong: one that runs in one process, and one of many ranks as long as
these are not joined by MPI."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn, TextIO

from hpcsgd.config.at_line import at_line
from hpcsgd.errors import JobError, UserError, in_one_line, tell
from hpcsgd.launcher import launched


@contextmanager
def told_in_one_line(file: Path | None = None, overrides: Sequence[str] = ()) -> Generator[None, None, None]:
    """End the process with the error's one line on stderr and exit code 1, without a traceback. Where it is
    about a key of `file`, a job file or a scenario, the error also names the line of that key."""
    try:
        with at_line(file, overrides) if file is not None else nullcontext():
            yield
    except UserError as error:
        told = error if isinstance(error, JobError) else in_one_line(error)  # of a fault there is a traceback
        print(f"hpcsgd: {told}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("hpcsgd: interrupted", file=sys.stderr)
        sys.exit(130)


@contextmanager
def until_nobody_reads() -> Generator[None, None, None]:
    """End the process with exit code 1, in silence, where whoever reads what it prints has gone, as ``head``
    does; as Python's documentation has it, see its note on SIGPIPE."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not _silence_unread():
            raise
        sys.exit(1)
    finally:
        _silence_unread()  # where a mistake was told to nobody, or the interpreter tries again at its end


def _silence_unread() -> bool:
    """Whether anybody has stopped reading stdout or stderr, who gets no more from now on."""
    streams: list[TextIO] = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    unread = [stream for stream in streams if _is_unread(stream)]
    for stream in unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return bool(unread)


def _is_unread(stream: TextIO) -> bool:
    try:
        stream.flush()
    except BrokenPipeError:
        return True
    return False


def end_all_ranks(error: Exception) -> NoReturn:
    """End this process with exit code 1, for a mistake that every rank finds alike; rank 0 tells it."""
    by = launched(os.environ)
    if by is None or by.rank == 0:
        tell(f"hpcsgd: {in_one_line(error)}")
    elif not by.launcher.of_mpi:
        time.sleep(1.0)  # torchrun ends the others when the first one has ended
    sys.exit(1)


def read_at_once(job: Path, overrides: Sequence[str], read: Callable[[], object]) -> None:
    """Find mistakes in the job file, by this `read` of it, before torch and MPI are loaded.

    Ranks on several nodes may see unlike files, and one that left alone would have the others wait for it in
    the start of MPI: they `read` the file later, and agree.
    """
    by = launched(os.environ)
    if by is not None and by.size != (by.local_size or 1):
        return
    try:
        with at_line(job, overrides):
            read()
    except UserError as error:
        end_all_ranks(error)
