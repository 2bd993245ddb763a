"""Replace a file only by a complete one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give a path beside `target` to write to, which becomes `target` when the block ends well.

    Until then `target` is as it was, even through a crash; if the block raises, what it wrote is removed.
    """
    part = target.with_name(f".{target.name}.{uuid4().hex[:8]}.part")
    try:
        yield part
        reach_disk(part)
        part.replace(target)
        reach_disk(target.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Give a path beside `target` to write to, which becomes `target` when the block ends well.

    Raises `FileExistsError` where there is a `target` by then, which stays as it is.
    """
    part = target.with_name(f".{target.name}.{uuid4().hex[:8]}.part")
    try:
        yield part
        reach_disk(part)
        os.link(part, target)  # unlike a renaming this replaces nothing
        reach_disk(target.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder beside `target` to write into, which becomes `target` when the block ends well.

    There must be no `target` yet. If the block raises, what it wrote is removed.
    """
    part = target.with_name(f".{target.name}.{uuid4().hex[:8]}.part")
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
    """Whole or not at all, whenever this process dies; not through a crash of the machine, as `replacing` is,
    so this waits for no disk. One process at a time."""
    part = target.with_name(f".{target.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(target)


def reach_disk(path: Path) -> None:
    """Return once a file, or the entries of a folder, would survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
