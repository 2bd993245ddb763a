from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

import programs
from hpcsgd.files.atomic import remove_left, replacing


def test_the_target_changes_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with replacing(target) as part:
        part.write_text("new")
        assert target.read_text() == "old"
        assert part.parent == tmp_path
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("interruption", [ValueError, KeyboardInterrupt])
def test_the_target_stays_if_the_block_raises(tmp_path: Path, interruption: type[BaseException]) -> None:
    target = tmp_path / "file"
    target.write_text("old")

    def interrupted() -> None:
        with replacing(target) as part:
            part.write_text("new")
            raise interruption

    with pytest.raises(interruption):
        interrupted()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_new_file_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with replacing(tmp_path / "file") as part:
        part.touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


KILLED = """\
import os, signal, sys
from pathlib import Path
from hpcsgd.files.atomic import new_folder, replacing

with replacing(Path(sys.argv[1]) / "file") as part, new_folder(Path(sys.argv[1]) / "folder") as other:
    part.write_text("half")
    (other / "x").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_killed_processes_have_left_is_removed(tmp_path: Path) -> None:
    """A file that the parent process is writing stays, and so do files with other names."""
    done = programs.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 2
    (tmp_path / ".of.another-machine.1.01234567.part").touch()
    (tmp_path / ".of-an-older-version.png.01234567.part").touch()
    of_a_living = next(iter(left)).split(".")
    of_a_living[-3] = str(os.getppid())
    stay = {".".join(of_a_living), ".overwritten.part", ".hidden", "x.part"}
    for name in stay:
        (tmp_path / name).touch()
    remove_left(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == stay


def test_where_there_is_no_folder_nothing_is_left(tmp_path: Path) -> None:
    remove_left(tmp_path / "nowhere")
