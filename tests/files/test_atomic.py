from __future__ import annotations

from pathlib import Path

import pytest

from hpcsgd.files.atomic import replacing


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
