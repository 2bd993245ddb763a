"""Writing of an HDF5 file, completely or not at all.

HDF5 does not survive a write that fails: if the disk is full, it keeps the file open forever and crashes the
process at exit. So its writes go through `Disk`, which only records the first failure. HDF5 continues as if
all writes had succeeded. When the file is closed, `Disk` raises the failure.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from hpcsgd.files.atomic import replacing

VERSIONS = ("v110", "v110")  # HDF5 since 1.10 reads these files, and finds their chunks by a flat index


@contextmanager
def new_file(target: Path) -> Iterator[h5py.File]:
    """Yield an empty HDF5 file to fill, which becomes `target` when the block ends well.

    If the block raises, or the data do not fit on the disk (`OSError`), `target` stays unchanged.
    """
    with replacing(target) as part, part.open("wb+", buffering=0) as file:
        disk = Disk(file)
        try:
            with h5py.File(disk, "w", libver=VERSIONS) as hdf5:
                yield hdf5
        except Exception:  # reading data that a failed write lost may raise; then raise the write's error
            disk.finish()
            raise
        disk.finish()


class Disk:
    """A file object for h5py that remembers failed writes instead of raising."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._failure: OSError | None = None
        self.seek, self.tell = file.seek, file.tell
        self.read, self.readinto = file.read, file.readinto

    def finish(self) -> None:
        """Raise the error of the first write that failed, if one did."""
        if self._failure is not None:
            raise self._failure

    def write(self, data: memoryview) -> None:
        rest = memoryview(data)
        while rest.nbytes and self._failure is None:
            rest = rest[self._attempt(self._file.write, rest) :]

    def truncate(self, size: int) -> None:
        self._attempt(self._file.truncate, size)

    def flush(self) -> None:
        """Do nothing, since nothing is buffered; h5py needs this method."""

    def _attempt(self, operation: Callable[[Any], int], argument: Any) -> int:
        if self._failure is None:
            try:
                return operation(argument)
            except OSError as error:
                self._failure = error
        return 0
