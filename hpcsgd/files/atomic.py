"""Atomic replacement of a file by a complete one.

Until the new file is complete, it is a hidden file in the folder of its target. The hidden file's name says
which process writes it. So files of killed processes can be distinguished from those still being written.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

_HOST = re.sub(r"[^\w-]", "-", platform.node())
_WRITER = re.compile(r"(\.(?P<host>[\w-]*)\.(?P<process>\d+))?\.[0-9a-f]{8}\.part$")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path in the folder of `target` to write to; it becomes `target` when the block ends well.

    Until then `target` is unchanged, even through a crash. If the block raises, the new file is removed.
    """
    part = _beside(target)
    try:
        yield part
        reach_disk(part)
        part.replace(target)
        reach_disk(target.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Yield a path in the folder of `target` to write to; it becomes `target` when the block ends well.

    Raises `FileExistsError` if `target` exists by then, and leaves it unchanged.
    """
    part = _beside(target)
    try:
        yield part
        reach_disk(part)
        os.link(part, target)  # unlike a renaming this replaces nothing
        reach_disk(target.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to write into, which becomes `target` when the block ends well.

    `target` must not exist yet. If the block raises, the new folder is removed.
    """
    part = _beside(target)
    part.mkdir()
    try:
        yield part
        for path in [*part.rglob("*"), part]:
            reach_disk(path)
        part.rename(target)
        reach_disk(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def overwrite(target: Path, text: str) -> None:
    """Write `text` to `target`, as a whole or not at all, even if this process dies.

    Unlike `replacing` this does not wait for the disk, so a crash of the machine may damage the file. Only
    one process at a time may write `target`.
    """
    part = target.with_name(f".{target.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(target)


def remove_left(folder: Path) -> None:
    """Remove unfinished files of processes that no longer exist from `folder`.

    Only processes on this machine may use the folder meanwhile. Files of processes on other machines are
    removed, too, because it is unknown whether those processes still exist.
    """
    for path in [*folder.glob(".*.part")]:
        found = _WRITER.search(path.name)
        if found is None:  # a file of `overwrite`, which uses the same name again
            continue
        if found["host"] == _HOST and _is_alive(int(found["process"])):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{_HOST}.{os.getpid()}.{uuid4().hex[:8]}.part")


def _is_alive(process: int) -> bool:
    """Return whether the process exists.

    The number of the present process counts as that of a killed one, because this process has just started
    and has no unfinished files yet.
    """
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def reach_disk(path: Path) -> None:
    """Return once a file, or the entries of a folder, would survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
