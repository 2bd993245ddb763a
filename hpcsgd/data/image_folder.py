"""Images in ImageNet's layout: a folder for training and one for tests, each with a folder per class."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpcsgd.data.formats.streams import existing
from hpcsgd.errors import UserError, require_utf8

SUFFIXES = (".jpeg", ".jpg", ".png")
SPLITS = {"train": ("train",), "test": ("val", "valid", "test")}
"""For each split of a dataset file, the allowed names of its folder; the first existing one is used."""
SHARD = 1 << 29
"""Approximate number of bytes of images in a shard. A killed conversion loses at most one shard."""


class File(NamedTuple):
    """An image file in a folder of images."""

    path: str
    """The path relative to the folder."""
    label: int
    """The index of the image's class."""
    size: int
    """The size in bytes."""
    changed: int
    """The time of the last change, in nanoseconds."""


@dataclass(frozen=True)
class ImageFolder:
    """A folder of images with its classes, and the files of each split in the order of classes and names."""

    folder: Path
    classes: tuple[str, ...]
    files: dict[str, list[File]]

    def shards(self, split: str) -> Iterator[list[File]]:
        """Yield the files of each shard of a split. Only the files' sizes determine where a shard ends."""
        some, size = [], 0
        for file in self.files[split]:
            some.append(file)
            size += file.size
            if size >= SHARD:
                yield some
                some, size = [], 0
        if some:
            yield some


def listed(source: Path) -> ImageFolder:
    """Return the image files in the folder `source`, without opening any.

    Names that begin with a dot are ignored. Raises `UserError` for a folder with another layout.
    """
    folder = existing(source, "a folder with train/ and val/")
    found = {split: split_folder(folder, split) for split in SPLITS}
    classes = tuple(entry.name for entry in _folders(found["train"]))
    if not classes:
        raise UserError(f"{found['train']}: no class folders in it")
    files: dict[str, list[File]] = {}
    for split, place in found.items():
        files[split] = []
        for entry in _folders(place):
            if entry.name not in classes:
                raise UserError(f"{entry.path}: there is no such class in {found['train']}")
            files[split] += _images(folder, Path(entry.path), classes.index(entry.name))
        if not files[split]:
            raise UserError(f"{place}: no class folders in it")
    return ImageFolder(folder, classes, files)


def split_folder(folder: Path, split: str) -> Path:
    """Return the folder with the images of a split. Raises `UserError` if there is none."""
    names = SPLITS[split]
    for name in names:
        if (folder / name).is_dir():
            return folder / name
    needed = " or ".join(f"{name}/" for name in names)
    raise UserError(f"{folder}: no folder {needed} in it, with the images to {split} on")


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of `folder` in the order of their names, without names that begin with a dot.

    Raises `UserError` if the folder cannot be read.
    """
    try:
        with os.scandir(folder) as found:
            return sorted((e for e in found if not e.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from error


def require_suffix(entry: os.DirEntry[str], allowed: Sequence[str]) -> None:
    if not entry.is_file() or not entry.name.lower().endswith(tuple(allowed)):
        raise UserError(f"{entry.path}: not an image; allowed here are files in {', '.join(allowed)}")


def fingerprint(files: Iterable[File]) -> str:
    """Return a hash of the paths, classes, sizes and times of change of `files`."""
    return hashlib.sha256("\n".join(map(repr, files)).encode()).hexdigest()[:32]


def _folders(place: Path) -> list[os.DirEntry[str]]:
    found = entries(place)
    for entry in found:
        if not entry.is_dir():
            raise UserError(f"{entry.path}: not in the folder of a class")
        require_utf8(entry.path)  # the name of the class is written to the dataset file
    return found


def _images(folder: Path, place: Path, label: int) -> Iterator[File]:
    found = entries(place)
    if not found:
        raise UserError(f"{place}: an empty class folder")
    for entry in found:
        require_suffix(entry, SUFFIXES)
        status = entry.stat()
        yield File(str(Path(entry.path).relative_to(folder)), label, status.st_size, status.st_mtime_ns)
