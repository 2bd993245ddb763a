"""The report of a user's mistakes in commands.

`errors_in_one_line` is for commands of a single process. `end_all_ranks` and `read_at_once` are for ranks
that MPI has not connected yet.
"""

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
def errors_in_one_line(
    file: Path | None = None, overrides: Sequence[str] = ()
) -> Generator[None, None, None]:
    """On a `UserError`, print its one line on stderr and end the process with exit code 1.

    If the error is about a key of `file`, a job file or a scenario, it also names the line of that key.
    """
    try:
        with at_line(file, overrides) if file is not None else nullcontext():
            yield
    except UserError as error:
        # a JobError may have a traceback, in several lines
        message = error if isinstance(error, JobError) else in_one_line(error)
        print(f"hpcsgd: {message}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("hpcsgd: interrupted", file=sys.stderr)
        sys.exit(130)


@contextmanager
def until_nobody_reads() -> Generator[None, None, None]:
    """End the process silently with exit code 1 if the reader of its output has gone, as with ``head``.

    This follows the note on SIGPIPE in Python's documentation. If the output cannot be written for another
    reason, such as a full disk, a process that is no rank says so in one line.
    """
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
    except OSError as error:
        if launched(os.environ) is not None or not _silence_unread():
            raise
        tell(f"hpcsgd: the output cannot be written: {error.strerror}")
        sys.exit(1)
    finally:
        # the reader of stderr may have gone, too, and the interpreter flushes again at its end
        _silence_unread()


def _silence_unread() -> bool:
    """Redirect stdout and stderr to /dev/null if they cannot be written; return True if one cannot.

    Usually their reader has gone.
    """
    streams: list[TextIO] = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    unread = [stream for stream in streams if _is_unread(stream)]
    for stream in unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return bool(unread)


def _is_unread(stream: TextIO) -> bool:
    try:
        stream.flush()
    except OSError:
        return True
    return False


def end_all_ranks(error: Exception) -> NoReturn:
    """End this process with exit code 1 after a mistake that every rank finds. Rank 0 reports `error`."""
    by = launched(os.environ)
    if by is None or by.rank == 0:
        tell(f"hpcsgd: {in_one_line(error)}")
    elif not by.launcher.of_mpi:
        time.sleep(1.0)  # torchrun ends the other ranks once the first has ended, so rank 0 reports first
    sys.exit(1)


def read_at_once(job: Path, overrides: Sequence[str], read: Callable[[], object]) -> None:
    """Call `read` to find mistakes in the job file before torch and MPI are loaded.

    Ranks on several nodes may see different files. If only one rank ended, the others would wait for it when
    MPI starts. So with several nodes nothing is read here. The ranks read the file later, and then they agree
    on a mistake.
    """
    by = launched(os.environ)
    if by is not None and by.size != (by.local_size or 1):
        return
    try:
        with at_line(job, overrides):
            read()
    except UserError as error:
        end_all_ranks(error)
