"""The folder of a run: configuration, starts (versions, host, time) and log. Only rank 0 uses it."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpcsgd.config.reader import read_toml
from hpcsgd.config.schema import Config, dump
from hpcsgd.errors import UserError
from hpcsgd.files import lock
from hpcsgd.files.atomic import remove_left, replacing
from hpcsgd.files.lock import locked
from hpcsgd.files.reading import read_json

logger = logging.getLogger(__name__)

JOB_FILE = "job.toml"
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in the run folder."""
PACKAGES = ("hpcsgd", "torch", "numpy", "h5py", "mpi4py")
LOG_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
GIT_TIMEOUT = 10  # seconds for a git command; a slow file system must not hold up the job


def open_run_folder(folder: Path, *, resume: bool) -> None:
    """Create the run folder, or continue in it.

    Raises `UserError` if it is not empty and ``resume`` is false.
    """
    with usable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            require_unused(folder)


@contextmanager
def owned(folder: Path, *, resume: bool) -> Iterator[None]:
    """Open the run folder and lock other processes out of it inside this context.

    Unfinished files of killed processes are removed. Raises `UserError` if another process uses the folder,
    or has used it while this one waited for the lock and ``resume`` is false.
    """
    with ExitStack() as held:
        open_run_folder(folder, resume=resume)
        with usable(folder):
            held.enter_context(locked(folder))
            if not resume:
                require_unused(folder)
            remove_left(folder)
        yield


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Turn an `OSError` of the block, which uses the run folder, into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder}: cannot be used as [run] output_dir: {error.strerror}") from error


def replica_group_folder(folder: Path, replica_group: int) -> Path:
    """Return the folder with log and metrics of one replica group of an elastic run."""
    return folder / "replica_groups" / str(replica_group)


def require_unused(folder: Path) -> None:
    """Raise `UserError` if the folder is not empty."""
    if folder.is_dir() and any(path.name != lock.NAME for path in folder.iterdir()):
        raise UserError(
            f"{folder}: holds a run: pass --resume to go on with it, or choose another [run] output_dir"
        )


def write_config(folder: Path, config: Config) -> None:
    """Write ``job.toml``. If a run resumes with another configuration, one warning names the changes."""
    job = folder / JOB_FILE
    text = dump(config)
    if job.exists() and (found := changes(read_toml(job), tomllib.loads(text))):
        logger.warning("resuming with another configuration than before: %s", found)
    _write(job, text)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the differences between the tables of two job files as text, or "" if there are none."""
    old, new = dict(flat(before)), dict(flat(now))
    keys = [key for key in old | new if old.get(key) != new.get(key)]
    return ", ".join(f"{key} {old.get(key, 'default')} → {new.get(key, 'default')}" for key in keys)


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables with full keys, such as ``optimizer.lr``."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def write_versions(
    folder: Path,
    *,
    mpi: str | None,
    groups: int,
    group_size: int,
    devices: Mapping[str, int] | None = None,
    device_backend: Mapping[str, str] | None = None,
) -> None:
    """Add this start of the run to ``versions.json``, a list with one entry per start.

    ``mpi`` is the version text of the MPI library, or None. P × K is ``groups`` × ``group_size``.
    ``devices`` says how many ranks train on which device, and ``device_backend`` how tensors there are
    communicated.
    """
    path = folder / "versions.json"
    starts = _starts(path) if path.exists() else []
    start = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "working_directory": os.getcwd(),
        "P": groups,
        "K": group_size,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "mpi": mpi,
        "devices": dict(devices or {}),
        "device_backend": dict(device_backend or {}),
        "host": platform.node(),
        "platform": platform.platform(),
        "git": _git_state(),
    }
    _write(path, json.dumps([*starts, start], indent=2))


def _starts(path: Path) -> list[Any]:
    try:
        found = read_json(path)
        if not isinstance(found, list):
            raise UserError(f"{path}: not the starts of a run")
    except UserError as error:
        raise UserError(f"{error}; move it away to go on without it") from error
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Return the commit of the working directory and whether files differ from it; None if git fails."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    finished = subprocess.run(
        ["git", *arguments], check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=GIT_TIMEOUT,
    )  # fmt: skip
    return finished.stdout.strip()


@contextmanager
def log_into(folder: Path) -> Iterator[None]:
    """Append everything that hpcsgd logs to ``run.log`` in ``folder`` inside this context."""
    handler = logging.FileHandler(folder / "run.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    package = logging.getLogger("hpcsgd")
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
        handler.close()


def write_summary(folder: Path, numbers: Mapping[str, Any]) -> None:
    """Write ``summary.json`` with `numbers`, which `hpcsgd.report.summary.summary` and others return."""
    _write(folder / "summary.json", json.dumps(numbers, indent=2))


def _write(target: Path, text: str) -> None:
    with replacing(target) as part:
        part.write_text(text, encoding="utf-8")
