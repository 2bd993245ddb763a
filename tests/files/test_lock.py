"""Only one process at a time uses a folder, however the one before it ended."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import programs
from hpcsgd.errors import UserError
from hpcsgd.files import lock
from hpcsgd.files.lock import locked

HOLDER = """\
import sys
from pathlib import Path
from hpcsgd.files.lock import locked

with locked(Path(sys.argv[1])):
    print("in it", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process_in(folder: Path) -> Iterator[programs.Running]:
    environment = {**os.environ, "SLURM_JOB_ID": "4711"}
    command = [sys.executable, "-c", HOLDER, folder]
    process = programs.start(command, env=environment, stdin=programs.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "in it\n"
    try:
        yield process
    finally:
        process.kill()
        programs.finish(process)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE", 0.0)


def test_the_second_one_reports_who_is_in_it(tmp_path: Path) -> None:
    with another_process_in(tmp_path) as process:
        who = rf"process {process.pid} of Slurm job 4711 on \S+, since 20\S+"
        with pytest.raises(UserError, match=rf"^{tmp_path}: in use by {who}: let it end"), locked(tmp_path):
            pass
        assert lock.NAME in os.listdir(tmp_path)


def test_a_killed_one_leaves_the_folder_to_others(tmp_path: Path) -> None:
    with another_process_in(tmp_path) as process:
        process.kill()
        process.wait()
        with locked(tmp_path):
            assert f"process {os.getpid()}" in (tmp_path / lock.NAME).read_text()
    assert os.listdir(tmp_path) == []


def test_a_file_that_has_just_been_removed_locks_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that had the lock removes the file after this one has opened it and before it locks it."""
    monkeypatch.setattr(lock, "PATIENCE", 60.0)
    take, taken = fcntl.lockf, []

    def slowly(*arguments: object) -> None:
        if not taken:
            (tmp_path / lock.NAME).unlink()
        taken.append(take(*arguments))  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(fcntl, "lockf", slowly)
    with locked(tmp_path):
        assert len(taken) == 2
        assert lock.NAME in os.listdir(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_there_is_a_warning(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", refused)
    with caplog.at_level(logging.WARNING), locked(tmp_path):
        pass
    (record,) = caplog.records
    assert record.message.startswith(f"{tmp_path}: this file system has no locks ({os.strerror(code)}): ")


def test_other_failures_come_through(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"), locked(tmp_path / "nowhere"):
        pass


HOLDS = """\
import sys
from pathlib import Path
from hpcsgd.files.lock import hold

for folder in sys.argv[1:]:
    hold(Path(folder))
    hold(Path(folder))
print("in it", flush=True)
sys.stdin.read()
"""


def test_folders_are_held_until_the_process_ends_and_left_empty(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    process = programs.start([sys.executable, "-c", HOLDS, *folders], stdin=programs.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "in it\n"
    for folder in folders:
        with pytest.raises(UserError, match=f"^{folder}: in use by process {process.pid} "):
            lock.hold(folder)
    programs.finish(process)  # this closes its input, and it ends
    for folder in folders:
        assert os.listdir(folder) == []
        with locked(folder):
            pass


def test_a_folder_that_was_removed_is_held_anew(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    for _ in range(2):
        folder.mkdir()
        lock.hold(folder)
        lock.hold(folder)
        assert f"process {os.getpid()}" in (folder / lock.NAME).read_text()
        (folder / lock.NAME).unlink()
        folder.rmdir()
