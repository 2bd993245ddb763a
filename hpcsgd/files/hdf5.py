"""Write an HDF5 file completely or not at all.

HDF5 does not survive a write that fails: once the disk is full it keeps the file open for good and crashes
the process when it ends. So its writes go through `Disk`, which notes the first failure and lets HDF5 believe
that all is well until the file is closed; then the failure is raised.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from hpcsgd.files.atomic import replacing

VERSIONS = ("v110", "v110")  # any HDF5 since 1.10 reads it; chunks are found by a flat index


@contextmanager
def new_file(target: Path) -> Iterator[h5py.File]:
    """An empty HDF5 file, to be filled, which becomes `target` when the block ends well.

    If the block raises, or what was written does not fit on the disk (`OSError`), `target` is left as it was.
    """
    with replacing(target) as part, part.open("wb+", buffering=0) as file:
        disk = Disk(file)
        try:
            with h5py.File(disk, "w", libver=VERSIONS) as hdf5:
                yield hdf5
        except Exception:  # it may have read back what never reached the disk: that is what went wrong
            disk.finish()
            raise
        disk.finish()


class Disk:
    """A file as h5py wants it, whose writes never fail but are remembered to have failed."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._failure: OSError | None = None
        self.seek, self.tell = file.seek, file.tell
        self.read, self.readinto = file.read, file.readinto

    def finish(self) -> None:
        """Raise the first failure, if there was one."""
        if self._failure is not None:
            raise self._failure

    def write(self, data: memoryview) -> None:
        rest = memoryview(data)
        while rest.nbytes and self._failure is None:
            rest = rest[self._attempt(self._file.write, rest) :]

    def truncate(self, size: int) -> None:
        self._attempt(self._file.truncate, size)

    def flush(self) -> None:
        """Nothing is held back: h5py asks for this method."""

    def _attempt(self, operation: Callable[[Any], int], argument: Any) -> int:
        if self._failure is None:
            try:
                return operation(argument)
            except OSError as error:
                self._failure = error
        return 0
