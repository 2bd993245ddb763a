"""Hidden folders of unfinished checkpoints, and of complete ones that an unfinished one was to replace.

.writing-step-00000340          a checkpoint that a job is writing, or was writing when it was killed
.writing-step-00000340.old      the earlier checkpoint of this step, moved aside for the new one
.writing-step-00000340.of-3     a checkpoint that replica group 3 is writing
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from hpcsgd.checkpoint.manifest import MANIFEST, names_of, title
from hpcsgd.files.atomic import remove_left

OLD = ".old"
_HIDDEN = ".writing-"
_MOVED = re.compile(rf"{re.escape(_HIDDEN)}(step-\d{{8,}})(\.of-\d+)?{re.escape(OLD)}")


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
