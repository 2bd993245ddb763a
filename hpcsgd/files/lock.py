"""A lock that one process has on a folder. The lock ends with the process, however the process ends."""

from __future__ import annotations

import atexit
import errno
import fcntl
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from hpcsgd.errors import UserError

log = logging.getLogger(__name__)

NAME = "run.lock"
PATIENCE = 5.0
"""Seconds for which a process that is being killed may still hold the lock."""
PAUSE = 0.1
JOBS = (("SLURM_JOB_ID", "Slurm"), ("PBS_JOBID", "PBS"), ("FLUX_JOB_ID", "Flux"))
_HELD = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock other processes, also on other machines, out of the existing `folder` inside this context.

    If the file system has no locks, a warning says so. This is a POSIX lock: all network file systems with
    locks have this kind, and the kernel releases the locks of a killed process.

    Raises:
        UserError: If another process uses the folder; the error says which one.
    """
    file = _taken(folder)
    try:
        yield
    finally:
        _given_back(folder, file)


def hold(folder: Path) -> None:
    """Lock the folder like `locked`, until this process ends; a second call changes nothing.

    Raises:
        UserError: If another process uses the folder; the error says which one.
    """
    folder = folder.resolve()
    with _holding:
        file = _held.get(folder)
        if file is not None and _is_there(folder / NAME, file):
            return
        _held[folder] = _taken(folder)
        if file is not None:  # the folder was removed meanwhile
            file.close()
        elif len(_held) == 1:
            atexit.register(_give_all_back, os.getpid())


_held: dict[Path, IO[str]] = {}
_holding = threading.Lock()  # ranks may be threads


def _give_all_back(owner: int) -> None:
    while _held and os.getpid() == owner:
        _given_back(*_held.popitem())


def _taken(folder: Path) -> IO[str]:
    path, deadline = folder / NAME, time.monotonic() + PATIENCE
    while (file := _locked(path)) is None:
        if time.monotonic() > deadline:
            raise UserError(
                f"{folder}: in use by {_in_it(path)}: let it end first, or choose another folder "
                f"(if its machine is gone for good, remove {path})"
            )
        time.sleep(PAUSE)
    return file


def _given_back(folder: Path, file: IO[str]) -> None:
    if _is_there(folder / NAME, file):
        with suppress(OSError):  # a remaining file does no harm
            (folder / NAME).unlink()
    file.close()


def _is_there(path: Path, file: IO[str]) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def _locked(path: Path) -> IO[str] | None:
    """Return the locked file, with the name of this process in it, or None if another process holds it."""
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            if error.errno in _HELD:
                return None
            raise
        log.warning(
            "%s: this file system has no locks (%s): see to it that no other job uses the folder",
            path.parent, error.strerror,
        )  # fmt: skip
        return file
    if not _is_there(path, file):
        file.close()  # the last holder of the lock has just removed the file
        return None
    file.truncate(0)
    file.write(_this_process())
    file.flush()
    os.fsync(file.fileno())  # other machines read it
    return file


def _in_it(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except FileNotFoundError:
        return "another process"


def _this_process() -> str:
    job = "".join(f" of {title} job {os.environ[name]}" for name, title in JOBS if name in os.environ)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return f"process {os.getpid()}{job} on {platform.node()}, since {now}\n"
