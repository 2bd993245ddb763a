"""What users see when a job fails: error messages of one line, without a traceback, and exit codes."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from difflib import get_close_matches
from os import PathLike
from typing import NamedTuple

from hpcsgd.renamed import new_name

PEER_LOST = 69
"""Exit code if other ranks did not answer, for which the machine is the likely cause (EX_UNAVAILABLE)."""
STOPPED = 75
"""Exit code of a run that saved a checkpoint and can continue with --resume (EX_TEMPFAIL)."""
MOVED = 76
"""Exit code of a replica group that is to be restarted with the ranks that it has been assigned."""
EXIT_CODE_FILE = "HPCSGD_EXIT_CODE"
"""The environment variable with the name of the file to which a job that fails or stops writes its code."""
LONG_VALUE = 200
"""Longest value or word, in characters, that an error line quotes whole."""
LONG_LINE = 2000
"""Most characters of an error line."""
KeyPath = tuple[str | int, ...]
"""A key of a TOML file: the tables around it, its index in a list of tables, and its name."""


class About(NamedTuple):
    """The configuration key that an error is about, from which its line in the file is found."""

    file: str | None = None
    """The name of the file with which the error line begins."""
    key: KeyPath = ()
    """The path of the key, as far as it is known: each enclosing `located` adds a part at its start."""
    value: str | float | None = None
    """The value of the key, if the message quotes it and it is a string or a number."""


class UserError(ValueError):
    """An error in what the user gave; the message says what was given, what is allowed and where.

    The command line prints it as one line, without a traceback.

    Args:
        message: One sentence: the key first, then what is wrong, what is allowed and what to do. Default ''.
        key: The argument or job-file key that the message is about; a tuple for a path of keys, such as
            ``("parallel", "groups")``. Its line in the file is found by it. Default ().
        value: The value of that key, if the message quotes it. Default None.
        file: The file with the key; the error line begins with it. Default None.

    Example:
        >>> hpcsgd.hierarchical(sync_every=0)
        Traceback (most recent call last):
        hpcsgd.errors.UserError: sync_every = 0: groups average after at least 1 step
    """

    def __init__(
        self,
        message: object = "",
        *,
        key: str | KeyPath = (),
        value: object = None,
        file: str | PathLike[str] | None = None,
    ) -> None:
        super().__init__(message if file is None else f"{file}: {message}")
        self.message = str(message)
        name = None if file is None else str(file)
        plain = value if isinstance(value, str | int | float) else None
        self.about = About(name, (key,) if isinstance(key, str) else key, plain)


class JobError(UserError):
    """A `UserError` that every rank of the job raises alike, so that only rank 0 prints it.

    Args:
        message: As in `UserError`. Default ''.
        key: The argument or job-file key that the message is about. Default ().
        value: The value of that key, if the message quotes it. Default None.
        file: The file with the key; the error line begins with it. Default None.

    Example:
        >>> with topology.raise_on_all_ranks("reading the data"):
        ...     if topology.rank == 3:
        ...         raise hpcsgd.UserError("no such file")
        Traceback (most recent call last):
        hpcsgd.errors.JobError: rank 3 of 4, reading the data: no such file
    """


_quiet = threading.Lock()


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress the warnings that are issued inside, even if ranks are threads.

    `warnings.catch_warnings` saves and restores a list that all threads share. So only one thread at a time
    may use it. Otherwise the first thread to leave would restore the warnings of the second.
    """
    with _quiet, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def located(place: str, *key: str | int) -> Iterator[None]:
    """Add a place in the configuration to the start of the message of a `UserError` raised inside.

    With `key` the new error is about that key, or about the key inside it that the original error was about.
    """
    try:
        yield
    except UserError as error:
        inner = error.about if key and error.about.file is None else About()
        raise type(error)(f"{place}: {error}", key=(*key, *inner.key), value=inner.value) from error


def in_section(section: str, *keys: str | int) -> AbstractContextManager[None]:
    """Apply `located` to a section of a job file, or to a key: ``[model.arguments]``, ``[data] path``.

    >>> with in_section("data", "path"):
    ...     raise UserError("no such file")
    Traceback (most recent call last):
    hpcsgd.errors.UserError: [data] path: no such file
    """
    return located(spot(section, *keys), *section.split("."), *keys)


def spot(section: str, *keys: str | int) -> str:
    """Return the name of a section of a job file, or of a key, in an error line.

    >>> spot("method", "grad_reduce", "sparsifier")
    '[method] grad_reduce sparsifier'
    """
    return " ".join([f"[{section}]", *map(str, keys)])


@contextmanager
def in_file(file: str | PathLike[str]) -> Iterator[None]:
    """Add `file`, which has the error's key, to the start of the message of a `UserError` raised inside."""
    try:
        yield
    except UserError as error:
        inner = error.about if error.about.file is None else About()
        raise type(error)(error, key=inner.key, value=inner.value, file=file) from error


def count_text(n: float, noun: str) -> str:
    """Return a count with its noun: ``1 group``, ``2 classes``, ``1,000 steps``, ``0.5 hours``."""
    ending = "" if n == 1 else "es" if noun.endswith("s") else "s"
    return f"{n:,} {noun}{ending}" if isinstance(n, int) else f"{n:.4g} {noun}{ending}"


def shortened(text: str, most: int = LONG_VALUE) -> str:
    """Return `text`; if it is longer than `most`, its middle is replaced with the number of characters.

    >>> shortened("x" * 5000, most=10)
    'xxxxx…(4,990 characters left out)…xxxxx'
    """
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]}…({left_out:,} characters left out)…{text[len(text) - (most - most // 2) :]}"


def in_one_line(message: object) -> str:
    """Return `message` as one printable line; it may quote input of users or output of libraries.

    Long words and long lines are `shortened`.

    >>> in_one_line("--x a\\nb: unknown key")
    '--x a b: unknown key'
    """
    joined = re.sub(r"\s*[\n\r]\s*", " ", str(message).strip())
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in joined)
    return shortened(re.sub(r"\S+", lambda word: shortened(word[0]), shown), LONG_LINE)


def tell(text: str) -> None:
    """Print an error on stderr, and write it to the files that a batch script or torchrun has named.

    A batch script names one file for all ranks. Without it, the script would see only how the other ranks
    were ended. The first rank to fail writes the file, and later ranks then print nothing. torchrun names one
    file for each rank.
    """
    name = os.environ.get("HPCSGD_FAILURE")
    if name and not _written_first(name, text):
        return
    _note_for_agent(text)
    print_at_once(text)


def note_exit_code(code: int) -> None:
    """Write the exit code of a failed job to the file that a batch script has named, if no rank has done so.

    torchrun ends with 1, whatever codes its ranks end with. A replica group that moves has not failed.
    """
    name = os.environ.get(EXIT_CODE_FILE)
    if name and code not in (0, MOVED):
        _written_first(name, str(code))


def _written_first(name: str, text: str) -> bool:
    """Write the file `name`, and return False if another rank has written it already.

    If it cannot be written, an error is printed.
    """
    try:
        with open(name, "x", encoding="utf-8") as file:
            print(text, file=file)
    except FileExistsError:
        return False
    except OSError as error:
        print_at_once(f"hpcsgd: {name}: cannot be written: {error.strerror}")
    return True


def forget_exit_code() -> None:
    """Remove the file with the exit code. Rank 0 does so before the ranks of a new attempt are connected."""
    if name := os.environ.get(EXIT_CODE_FILE):
        with suppress(OSError):
            os.unlink(name)


def _note_for_agent(text: str) -> None:
    """Write the file that torchrun reads when this rank has ended, for its table of failures."""
    if name := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(name, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def print_at_once(text: str) -> None:
    """Print to the original stderr, or nowhere if the script has closed it.

    An excepthook's own output would be held back by torch.distributed.
    """
    with suppress(OSError, ValueError):
        print(text, file=sys.__stderr__ or sys.stderr, flush=True)


def require_utf8(name: str) -> None:
    """Raise `UserError` for a name, or a typed word, that a text file cannot contain."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name}: not UTF-8: give another name, and rename what it names") from error


def near_miss(given: str, allowed: Iterable[str]) -> str:
    """Return the end of an error line: the likely intended name, then all allowed ones.

    >>> near_miss("hierachical", ["bsp", "hierarchical"])
    "did you mean 'hierarchical'? Allowed: bsp, hierarchical"
    >>> near_miss("every", ["grad_reduce", "sync_every"])     # its name before the first release
    "did you mean 'sync_every'? Allowed: grad_reduce, sync_every"
    """
    names = sorted(allowed)
    by_letters = {name.lower(): name for name in names}
    close = [by_letters[name] for name in get_close_matches(given.lower(), by_letters, n=1)]
    meant = by_letters.get(given.lower()) or new_name(given, names) or next(iter(close), None)
    hint = f"did you mean {meant!r}? " if meant else ""
    return f"{hint}Allowed: {', '.join(names)}"
