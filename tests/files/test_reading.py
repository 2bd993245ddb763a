"""A file of the wrong kind or content gives an error of one line that says what it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcsgd.config.reader import read_toml
from hpcsgd.errors import UserError
from hpcsgd.files.reading import read_json, read_text

DEEP = "[" * 100_000


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("folder", "a folder"), ("pipe", "a pipe")):
        with pytest.raises(UserError, match=rf"^{tmp_path}/{name}: {kind}, and not a file$"):
            read_text(tmp_path / name)
    with pytest.raises(UserError, match=r"/dev/null: a device, and not a file$"):
        read_text(Path(os.devnull))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff", "not UTF-8 text: invalid start byte at byte 0"),
        (b"{", "not JSON: Expecting"),
        (b"", "not JSON"),
        (DEEP.encode(), "not JSON: too many lists or tables inside each other"),
    ],
)
def test_what_is_no_json(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match=rf"^{tmp_path}/file: {told}"):
        read_json(tmp_path / "file")


def test_a_byte_order_mark_is_none_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}", encoding="utf-8-sig")
    assert read_json(tmp_path / "file") == {}


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"file: cannot be read: No such file or directory$"):
        read_json(tmp_path / "file")


def test_a_job_file_of_too_many_levels(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f"a = {DEEP}")
    with pytest.raises(UserError, match=r"job.toml: too many lists or tables inside each other$"):
        read_toml(tmp_path / "job.toml")
