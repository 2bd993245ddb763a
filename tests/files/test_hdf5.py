from __future__ import annotations

import errno
import io
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import programs
from hpcsgd.files.hdf5 import Disk, new_file

FULL_DISK = """
import resource, sys
import numpy as np
from pathlib import Path
from hpcsgd.files.hdf5 import new_file

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    with new_file(Path(sys.argv[1])) as file:
        file.create_dataset("x", data=np.arange(30_000), chunks=(100,), fletcher32=True)
except OSError as error:
    print(error.strerror)
"""


def test_a_new_file_is_a_plain_hdf5_file(tmp_path: Path) -> None:
    with new_file(tmp_path / "new.h5") as file:
        file["x"] = np.arange(1000)
        assert not (tmp_path / "new.h5").exists()
    with h5py.File(tmp_path / "new.h5") as file:
        assert np.array_equal(np.asarray(file["x"]), np.arange(1000))


@pytest.mark.parametrize("size", [5_000, 120_000])
def test_a_process_ends_well_after_a_full_disk(tmp_path: Path, size: int) -> None:
    target = tmp_path / "new.h5"
    command = [sys.executable, "-c", FULL_DISK, str(target), str(size)]
    ended = programs.run(command, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "File too large\n", "")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_reported_before_what_hdf5_then_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(disk: Disk, _: memoryview) -> None:
        disk._failure = OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Disk, "write", full)
    with pytest.raises(OSError, match="No space left"), new_file(tmp_path / "new.h5") as file:
        file["x"] = np.arange(1000)
        raise RuntimeError("addr overflow")
    assert not (tmp_path / "new.h5").exists()


class ShortWrites(io.FileIO):
    """A file that writes at most 3 bytes at a time, as a system call may."""

    def write(self, data: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().write(data[:3])


def test_short_writes_are_completed(tmp_path: Path) -> None:
    with ShortWrites(tmp_path / "file", "w") as file:
        Disk(file).write(memoryview(b"0123456789"))
    assert (tmp_path / "file").read_bytes() == b"0123456789"
