"""A folder with the last two checkpoints of a run. Each is complete or absent, and damage is detected.

    step-00000340/rank-00000.h5 …   the state that each rank saved
    step-00000340/manifest.json     written last: the numbers of groups and ranks, every file's size and
    SHA-256

A checkpoint is written in a hidden folder. The folder is renamed when all its files have reached the disk.
Before that, an earlier checkpoint of the same step is moved aside.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpcsgd.checkpoint import tree
from hpcsgd.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    OLD,
    Saved,
    differs,
    file_name,
    fingerprint,
    hidden_name,
    moved_aside,
    names_of,
    put_back,
    read_manifest,
    remove_unfinished,
    title,
)
from hpcsgd.comm.on_host import on_host
from hpcsgd.core.topology import Topology, gather_or_raise
from hpcsgd.errors import JobError, UserError
from hpcsgd.files.atomic import reach_disk, replacing
from hpcsgd.files.hdf5 import new_file
from hpcsgd.files.lock import hold

log = logging.getLogger(__name__)

KEPT = 2
_TITLE = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"manifest\.json|rank-\d{5,}\.h5")


class Checkpoints:
    """The checkpoints of one run, in a folder that all ranks see. Every method is collective."""

    def __init__(self, folder: Path, topology: Topology) -> None:
        self._folder = folder
        self._job = topology
        self._owner = f".of-{topology.replica_groups.index}" if topology.is_elastic else ""
        """The end of the names of unfinished checkpoints: other replica groups write into the folder, too."""
        self.writing = False
        """True while this rank's own file is being written."""

    def write(self, step: int, state: Mapping[str, Any]) -> None:
        """Save this rank's `state` of `step`. Afterwards the folder has the `KEPT` newest checkpoints.

        Raises `JobError` if a rank cannot write. Earlier checkpoints stay unchanged.
        """
        hidden = self._folder / hidden_name(step, self._owner)
        try:
            self._write_hidden(hidden, step, state)
        except JobError:  # no rank is writing any more
            if self._job.rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)
            raise

    def remove(self, step: int) -> None:
        """Remove the checkpoint of `step`."""
        if self._job.rank == 0:
            shutil.rmtree(self._folder / title(step), ignore_errors=True)

    def claim(self) -> None:
        """Lock other jobs out of the folder until this process ends; only rank 0 calls this.

        Raises `UserError` if another job holds the lock.
        """
        with _writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            hold(self._folder)

    def put_back(self) -> None:
        """Put back checkpoints that this job, or this group, had moved aside when it was killed.

        Only rank 0 calls this, with a lock of the folder or of the run.
        """
        with _writing(self._folder):
            put_back(self._folder, self._owner)

    def recover(self) -> None:
        """Put back checkpoints that a killed job had moved aside; if there are any, `claim` the folder.

        What a running job has moved aside at this moment is left to that job.
        """
        with self._job.raise_on_all_ranks("reading checkpoints"):
            if self._job.rank == 0 and moved_aside(self._folder):
                try:
                    self.claim()
                except UserError:
                    if moved_aside(self._folder):
                        raise
                self.put_back()

    def newest(self) -> Saved | None:
        """Return the newest checkpoint that is complete, or None if the folder has no checkpoints.

        Damaged checkpoints are skipped with a warning. Raises `JobError` if all checkpoints are damaged, or a
        rank cannot read one.
        """
        candidates = self._listed()
        for name in candidates:
            found, damage = self._looked_at(self._folder / name)
            if found is not None:
                return found
            if self._job.rank == 0:
                log.warning("checkpoint %s is damaged (%s): falling back to the one before", name, damage)
        if candidates != self._listed():  # meanwhile another replica group has written newer ones
            return self.newest()
        with self._job.raise_on_all_ranks("reading checkpoints"):
            if candidates:
                raise UserError(f"{self._folder}: all checkpoints are damaged: {', '.join(candidates)}")
        return None

    def of_step(self, step: int) -> Saved:
        """Return the checkpoint of `step`. Raises `JobError` if it is absent or damaged."""
        path = self._folder / title(step)
        found, damage = self._looked_at(path)
        with self._job.raise_on_all_ranks("reading checkpoints"):
            if found is None:
                raise UserError(f"{path}: no checkpoint is there, or it is damaged ({damage})")
        assert found is not None
        return found

    def whole(self, saved: Saved) -> bool:
        """Return whether `saved` is still complete. Another replica group may have removed it."""
        return self._looked_at(saved.path)[0] is not None

    def _listed(self) -> list[str]:
        """Return the names of the checkpoints that rank 0 sees, the newest first."""
        rank, world = self._job.rank, self._job.world
        return gather_or_raise(world, "reading checkpoints", lambda: [] if rank else titles(self._folder))[0]

    def _write_hidden(self, hidden: Path, step: int, state: Mapping[str, Any]) -> None:
        later: list[str] = []
        with self._job.raise_on_all_ranks("writing a checkpoint"), _writing(hidden):
            if self._job.rank == 0:
                final = self._folder / title(step)
                if final.exists() and not _is_ours(final):
                    raise UserError(f"{final} is no checkpoint: give another folder, or remove it")
                remove_unfinished(self._folder, self._owner)
                hidden.mkdir(parents=True)
                later = [name for name in titles(self._folder) if _step(name) > step]
        entry: dict[str, Any] = {}
        with self._job.raise_on_all_ranks("writing a checkpoint"), _writing(hidden):
            entry = self._write_own(hidden / file_name(self._job.rank), state)
        files = self._job.world.gather_objects(entry)
        with self._job.raise_on_all_ranks("writing a checkpoint"), _writing(hidden):
            if self._job.rank == 0:
                self._complete(hidden, step, files)
                self._remove_all_but_newest(later)

    def _write_own(self, target: Path, state: Mapping[str, Any]) -> dict[str, Any]:
        self.writing = True
        try:
            with new_file(target) as file:
                tree.write(file, on_host(state))
            return fingerprint(target)
        finally:
            self.writing = False

    def _looked_at(self, path: Path) -> tuple[Saved | None, str | None]:
        """Return the checkpoint at `path` and None; if it is damaged, None and a text about the damage.

        Each rank checks some of the files. All ranks return the same. A file that cannot be read is no
        damage: this raises `JobError`.
        """

        def look() -> tuple[Saved | None, str | None]:
            try:
                saved, files = read_manifest(path)
                mine = range(self._job.rank, len(files), self._job.world_size)
                return saved, next((d for i in mine if (d := differs(path / file_name(i), files[i]))), None)
            except FileNotFoundError:
                return None, f"{MANIFEST} is missing"
            except UserError:  # a file cannot be read
                raise
            except (ValueError, KeyError, TypeError, ArithmeticError) as error:
                return None, f"{MANIFEST}: {error}"

        looks = gather_or_raise(self._job.world, "reading checkpoints", look)
        damage = next((d for _, d in looks if d is not None), None)
        return (looks[self._job.rank][0] if damage is None else None), damage

    def _complete(self, hidden: Path, step: int, files: list[dict[str, Any]]) -> None:
        manifest = {
            "format": FORMAT,
            "step": step,
            "P": self._job.num_groups,
            "K": self._job.group_size,
            "files": files,
        }
        with replacing(hidden / MANIFEST) as part:
            part.write_text(json.dumps(manifest, indent=1))
        final = self._folder / title(step)
        old = hidden.with_name(f"{hidden.name}{OLD}")
        if final.exists():  # a damaged checkpoint, or an earlier one of the same step
            os.replace(final, old)
        try:
            os.replace(hidden, final)
        except OSError:
            with suppress(OSError):  # there is no earlier one, or the next start puts it back
                os.replace(old, final)
            raise
        reach_disk(self._folder)
        shutil.rmtree(old, ignore_errors=True)

    def _remove_all_but_newest(self, later: Sequence[str]) -> None:
        """Remove `later`, and of the other checkpoints all except the `KEPT` newest.

        `later` are those of later steps that were there when this one was begun: they were found damaged, so
        an earlier one was loaded. Meanwhile another replica group may have finished one of a later step.
        """
        listed = titles(self._folder)
        kept = [name for name in listed if name not in later][:KEPT]
        for name in listed:
            if name not in kept and _is_ours(self._folder / name):
                shutil.rmtree(self._folder / name, ignore_errors=True)


def titles(folder: Path) -> list[str]:
    """Return the names of all checkpoints in `folder`, those of later steps first.

    Raises `UserError` if it cannot be read.
    """
    names = [name for name in names_of(folder) if _TITLE.fullmatch(name) and _has_ours(folder / name)]
    return sorted(names, key=_step, reverse=True)


def require_outside(folder: Path) -> None:
    """Raise `UserError` if `folder` is not a folder for checkpoints, but a checkpoint itself or a file."""
    if _has_ours(folder) or _TITLE.fullmatch(folder.name):
        raise UserError(
            f"{folder} is a checkpoint, or has the name of one: give the folder that it is in, "
            f"{folder.parent}, of which the newest one is loaded; to go on from an older one, copy that into "
            "a folder of its own"
        )
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"{folder} is a file: give a folder for checkpoints")


def _has_ours(path: Path) -> bool:
    """Return whether the folder `path` has any file that is named like a file of a checkpoint."""
    return any(map(_FILE.fullmatch, names_of(path)))


def _is_ours(path: Path) -> bool:
    """Return whether all files in the folder `path`, except hidden ones, have names of checkpoint files."""
    names = [name for name in names_of(path) if not name.startswith(".")]
    return bool(names) and all(map(_FILE.fullmatch, names))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an `OSError`, such as a full disk or a missing permission, into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: checkpoint not written: {error.strerror or error}") from error


def _step(title: str) -> int:
    return int(title.removeprefix("step-"))
