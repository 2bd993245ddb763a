"""Folders of checkpoints: the manifest of a complete one, and the names of unfinished ones.

The manifest has the step, the numbers of groups and ranks, and each file's size and checksum. These folders
are hidden:

.writing-step-00000340          a checkpoint that a job is writing, or was writing when it was killed
.writing-step-00000340.old      the earlier checkpoint of this step, moved aside for the new one
.writing-step-00000340.of-3     a checkpoint that replica group 3 is writing
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcsgd.errors import UserError, count_text
from hpcsgd.files.atomic import remove_left
from hpcsgd.files.reading import parsed
from hpcsgd.files.shared import names_in

MANIFEST = "manifest.json"
FORMAT = 4
OLD = ".old"
_HIDDEN = ".writing-"
_MOVED = re.compile(rf"{re.escape(_HIDDEN)}(step-\d{{8,}})(\.of-\d+)?{re.escape(OLD)}")


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint of one step, which P groups of K ranks have saved."""

    path: Path
    step: int
    P: int
    K: int
    optimizer: int = 0
    """Index of the optimizer to read, if a script has saved several in one checkpoint."""

    def rank_file(self, g: int, j: int) -> Path:
        """Return the file of rank j of group g."""
        return self.path / file_name(g * self.K + j)


def title(step: int) -> str:
    """Return the name of the folder of the checkpoint of `step`."""
    return f"step-{step:08d}"


def file_name(rank: int) -> str:
    """Return the name of the file that `rank` has saved."""
    return f"rank-{rank:05d}.h5"


def names_of(path: Path) -> list[str]:
    """Return the names in a folder; none if it does not exist. Raises `UserError` if it cannot be read."""
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):  # another replica group may have removed it
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def read_manifest(path: Path) -> tuple[Saved, list[dict[str, Any]]]:
    """Return the checkpoint at `path`, and the fingerprint of each rank's file.

    Raises `FileNotFoundError` if there is no manifest, `UserError` if it cannot be read, and `ValueError`,
    `KeyError`, `TypeError` or `ArithmeticError` if it is damaged.
    """
    with _reading(path / MANIFEST):
        manifest = parsed((path / MANIFEST).read_bytes())
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
    saved = Saved(path, manifest["step"], manifest["P"], manifest["K"])
    if title(saved.step) != path.name:
        raise ValueError(f"of step {saved.step}")
    if len(manifest["files"]) != saved.P * saved.K:
        raise ValueError(f"{count_text(len(manifest['files']), 'file')} for {saved.P} × {saved.K} ranks")
    return saved, manifest["files"]


def fingerprint(file: Path) -> dict[str, Any]:
    """Return the size and the checksum of a file, as the manifest has them."""
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def differs(file: Path, expected: Mapping[str, Any]) -> str | None:
    """Return a text about the damage if `file` does not have the `expected` fingerprint, else None.

    Raises `UserError` if it cannot be read.
    """
    try:
        with _reading(file):
            size = file.stat().st_size
            if size != expected["bytes"]:
                return f"{file.name} has {size} bytes instead of {expected['bytes']}"
            return None if fingerprint(file) == expected else f"{file.name} does not match its checksum"
    except FileNotFoundError:
        return f"{file.name} is missing"


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn an `OSError` of the block, which reads `file`, into a `UserError`, unless the file is missing.

    Another replica group may remove the file meanwhile. Then NFS calls it stale, and this raises
    `FileNotFoundError`.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if not _is_listed(file):
            raise FileNotFoundError(file) from error
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from error


def _is_listed(file: Path) -> bool:
    try:
        return file.name in names_in(file.parent)
    except OSError as error:  # a file in place of the folder, or the folder cannot be read either
        return not isinstance(error, NotADirectoryError)


def hidden_name(step: int, owner: str = "") -> str:
    """Return the name of the folder in which the checkpoint of `step` is written.

    `owner` ends the names of a replica group, as in ".of-3".
    """
    return f"{_HIDDEN}{title(step)}{owner}"


def moved_aside(folder: Path, owner: str = "") -> list[tuple[Path, Path]]:
    """Return the checkpoints in `folder` that were moved aside and not replaced: each path, and its old path.

    With `owner` these are the ones that this replica group has moved. A job that is saving may have moved
    them at this moment.
    """
    found = filter(None, map(_MOVED.fullmatch, names_of(folder)))
    paths = [(folder / each[0], folder / each[1]) for each in found if owner in ("", each[2])]
    return [(hidden, final) for hidden, final in paths if (hidden / MANIFEST).exists() and not final.exists()]


def put_back(folder: Path, owner: str = "") -> None:
    """Put back what a job, or one replica group, had moved aside when it was killed.

    Nobody may write such checkpoints at the same time.
    """
    for hidden, final in moved_aside(folder, owner):
        os.replace(hidden, final)


def remove_unfinished(folder: Path, owner: str = "") -> None:
    """Remove unfinished checkpoints of killed runs, or those of one replica group, and put back earlier ones.

    Nobody may write such checkpoints at the same time.
    """
    put_back(folder, owner)
    for end in (owner, f"{owner}{OLD}") if owner else ("",):
        for hidden in [*folder.glob(f"{_HIDDEN}step-*{end}")]:
            shutil.rmtree(hidden)
    if not owner:
        remove_left(folder)
