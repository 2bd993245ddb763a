"""What a job tells its users: errors of one clear line without a traceback, and exit codes."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

PEER_LOST = 69
"""Exit code where other ranks did not answer: rather the machine's fault than the job's (EX_UNAVAILABLE)."""
STOPPED = 75
"""Exit code of a run that saved a checkpoint and can go on with --resume (EX_TEMPFAIL)."""
MOVED = 76
"""Exit code of an island that is to be started again with the ranks that it has been given."""


class UserError(ValueError):
    """What was given cannot be used; the message says what was given, what is allowed and where.

    The command line prints it as one line, without a traceback. It is a `ValueError`.

    Not to be confused with `AssertionError`: that is a mistake of ours, to be reported.

    Example:
        >>> hpcsgd.hierarchical(every=0)
        Traceback (most recent call last):
        hpcsgd.errors.UserError: every = 0: groups meet after at least 1 step
    """


class JobError(UserError):
    """A `UserError` that every rank of the job raises alike, so that rank 0 alone prints it.

    Not to be confused with a `UserError` of one rank, after which that rank ends the job.

    Example:
        >>> with job.together("reading the data"):
        ...     if job.rank == 3:
        ...         raise hpcsgd.UserError("no such file")
        Traceback (most recent call last):
        hpcsgd.errors.JobError: rank 3 of 4, reading the data: no such file
    """


_quiet = threading.Lock()


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress the warnings that are issued inside, also where ranks are threads.

    `warnings.catch_warnings` saves and restores a list that all threads share. One thread at a time may do
    so: otherwise the first one to leave would bring the warnings of the second one back.
    """
    with _quiet, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def located(place: str) -> Iterator[None]:
    """Begin the message of a `UserError` raised inside with the place in the configuration it is about."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{place}: {error}") from error


def in_one_line(message: object) -> str:
    """What is said of a mistake, without what would break its line, or hide a part of it: what users give and
    libraries say is quoted in it.

    >>> in_one_line("--x a\\nb: unknown key")
    '--x a b: unknown key'
    """
    joined = re.sub(r"\s*[\n\r]\s*", " ", str(message).strip())
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in joined)


def require_utf8(name: str) -> None:
    """Raise `UserError` for a name, or a word typed, that no file of text can have in it."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name}: not UTF-8: give another name, and rename what it names") from error


def near_miss(given: str, allowed: Iterable[str]) -> str:
    """The end of an error line: the likely intended name, then all the allowed ones.

    >>> near_miss("hierachical", ["bsp", "hierarchical"])
    "did you mean 'hierarchical'? Allowed: bsp, hierarchical"
    """
    names = sorted(allowed)
    by_letters = {name.lower(): name for name in names}
    close = get_close_matches(given.lower(), by_letters, n=1)
    hint = f"did you mean {by_letters[close[0]]!r}? " if close else ""
    return f"{hint}Allowed: {', '.join(names)}"
