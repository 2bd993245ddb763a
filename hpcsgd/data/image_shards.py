"""Write encoded images to shards, HDF5 files in a folder next to the dataset file, and read them.

The name of a shard is a hash of the paths, sizes and times of the files in it. So a repeated conversion of a
folder finds the shards that are complete. An existing dataset file keeps its shards until the new dataset
file is complete. A shard of n images has these HDF5 datasets:

=========  =======================================================================================
x          uint8 [bytes]: the content of all files, one after the other
length     uint32 [n]: the size of each file in bytes
crc32      uint32 [n]: the checksum of each file
histogram  int64 [3, 256]: how often each value occurs in each channel, in all images together
=========  =======================================================================================
"""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcsgd.data.decoding import decoded, histogram
from hpcsgd.data.image_folder import File, ImageFolder, fingerprint
from hpcsgd.errors import UserError, located
from hpcsgd.files.hdf5 import new_file

AT_ONCE = 256
"""Number of files that are read and checked together."""
OPEN = 256
"""Number of shards that a process keeps open."""
DAMAGE = (OSError, RuntimeError, KeyError, ValueError)


@dataclass(frozen=True)
class Written:
    """A complete shard: its file name, and the datasets in it except the images themselves."""

    name: str
    length: NDArray[np.uint32]
    crc32: NDArray[np.uint32]
    histogram: NDArray[np.int64]


def folder_of(data_file: Path) -> Path:
    """Return the folder with the shards of the dataset file at the path `data_file`."""
    return data_file.with_name(f"{data_file.name}.shards")


def shards_of(
    source: ImageFolder, data_file: Path, progress: Callable[[int, int], None]
) -> dict[str, list[Written]]:
    """Return the shards of each split, after writing those that are missing.

    `progress` is called with the numbers of images done and in total. Raises `UserError`, which names the
    first file that is no image, and `OSError` if nothing can be written.
    """
    folder, everything = folder_of(data_file), sum(map(len, source.files.values()))
    folder.mkdir(exist_ok=True)
    for left in folder.glob(".*.part"):  # incomplete files of a conversion that was killed
        left.unlink()
    found: dict[str, list[Written]] = {split: [] for split in source.files}
    behind = 0

    def done(more: int) -> None:
        nonlocal behind
        behind += more
        progress(behind, everything)

    for split, shards in found.items():
        for files in source.shards(split):
            there = complete(folder, files)
            if there is not None:
                done(len(files))
            shards.append(there or write(source.folder, folder, files, done))
    return found


def remove_others(data_file: Path, shards: Mapping[str, Sequence[Written]]) -> None:
    """Remove the shards in the dataset file's folder that are not in `shards`: those of an earlier file."""
    own = {shard.name for some in shards.values() for shard in some}
    for path in folder_of(data_file).glob("*.h5"):
        if path.name not in own:
            path.unlink()


def complete(folder: Path, files: Sequence[File]) -> Written | None:
    """Return the shard of `files` in `folder` if it is complete, or None; checksums are not compared."""
    name = f"{fingerprint(files)}.h5"
    try:
        with h5py.File(folder / name, "r", locking=False) as file:
            length, crc32, values = (np.asarray(file[key]) for key in ("length", "crc32", "histogram"))
            whole = np.array([each.size for each in files])
            size = file["x"].shape  # pyright: ignore[reportAttributeAccessIssue]
            if np.array_equal(length, whole) and len(crc32) == len(whole) and size == (whole.sum(),):
                return Written(name, length, crc32, values)
    except DAMAGE:
        pass
    return None


def write(source: Path, folder: Path, files: Sequence[File], done: Callable[[int], None]) -> Written:
    """Write a shard of these `files` of the folder `source`, and decode each one as a test.

    `done` is called with the number of files written since its last call. Raises `UserError`, which names the
    first file that is no image, and `OSError` if nothing can be written.
    """
    name = f"{fingerprint(files)}.h5"
    crc32, values = np.empty(len(files), "<u4"), np.zeros((3, 256), np.int64)
    length, place = np.array([file.size for file in files], "<u4"), 0
    with new_file(folder / name) as shard:
        x = shard.create_dataset("x", (int(length.sum(dtype=np.int64)),), np.uint8)
        for number, (content, counts) in enumerate(_looked_through(source, files, done)):
            x[place : place + len(content)] = np.frombuffer(content, np.uint8)
            place += len(content)
            crc32[number] = zlib.crc32(content)
            values += counts
        for key, numbers in (("length", length), ("crc32", crc32), ("histogram", values)):
            shard.create_dataset(key, data=numbers, chunks=numbers.shape, fletcher32=True)
    return Written(name, length, crc32, values)


def _looked_through(
    source: Path, files: Sequence[File], done: Callable[[int], None]
) -> Iterator[tuple[bytes, NDArray[np.int64]]]:
    def look(file: File) -> tuple[bytes, NDArray[np.int64]]:
        path = source / file.path
        with located(str(path)):
            try:
                content = path.read_bytes()
            except OSError as error:
                raise UserError(f"cannot be read ({error.strerror})") from error
            if len(content) != file.size:
                raise UserError(f"had {file.size} bytes when the conversion began, and now {len(content)}")
            return content, histogram(decoded(content))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for start in range(0, len(files), AT_ONCE):
            some = files[start : start + AT_ONCE]
            yield from pool.map(look, some)
            done(len(some))


class Reader:
    """A reader of the shards `names` in `folder`.

    Each process opens a shard when it first reads it, so the reader may be pickled and may cross forks.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder, self._names = folder, tuple(names)
        self._open: OrderedDict[int, h5py.File] = OrderedDict()
        self._process = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": OrderedDict()}

    def require_all(self) -> None:
        """Raise `UserError` unless all shards exist."""
        missing = [name for name in self._names if not (self._folder / name).is_file()]
        if missing:
            raise UserError(
                f"{self._folder}: {len(missing)} of {len(self._names)} shards of the dataset file "
                f"are missing, such as {missing[0]}: put them into this folder next to it"
            )

    def read(self, shard: int, begin: int, length: int, crc32: int) -> bytes:
        """Return `length` bytes of a shard from `begin` on: an encoded image.

        Raises `UserError` if the bytes do not match the checksum `crc32`.
        """
        path = self._folder / self._names[shard]
        try:
            content = self._x(shard)[begin : begin + length].tobytes()
        except DAMAGE as error:
            raise UserError(f"{path}: damaged or cut off ({error}); convert the folder again") from error
        if zlib.crc32(content) != crc32:
            raise UserError(
                f"{path}: the image at byte {begin} does not match its checksum: remove this file and "
                "convert the folder again"
            )
        return content

    def _x(self, shard: int) -> Any:
        if self._process != os.getpid():
            self._open, self._process = OrderedDict(), os.getpid()
        if shard not in self._open:
            self._open[shard] = h5py.File(self._folder / self._names[shard], "r", locking=False)
        self._open.move_to_end(shard)
        if len(self._open) > OPEN:
            self._open.popitem(last=False)[1].close()
        return self._open[shard]["x"]
