from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from full_disks import full_after
from hpcsgd.data import READERS, convert
from hpcsgd.data.images import Block, Images
from hpcsgd.errors import UserError


def test_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no data kind 'cifar-10'; did you mean 'cifar10'"):
        convert("cifar-10", tmp_path, tmp_path / "store.h5")
    with pytest.raises(UserError, match=r"did you mean 'npz'\? Allowed: cifar10, .*npz, pairs, text"):
        convert("npy", tmp_path, tmp_path / "store.h5")
    with pytest.raises(UserError, match=r"'npz': hpcsgd\.data\.convert_npz converts them"):
        convert("npz", tmp_path, tmp_path / "store.h5")


def test_targets_that_cannot_be(tmp_path: Path, idx_folder: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        convert("mnist", idx_folder, tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        convert("mnist", idx_folder, tmp_path / "nowhere" / "store.h5")


def test_an_old_store_stays_until_the_new_one_is_complete(tmp_path: Path, idx_folder: Path) -> None:
    target = tmp_path / "store.h5"
    convert("mnist", idx_folder, target)
    before = target.read_bytes()
    file = idx_folder / "t10k-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(UserError):
        convert("mnist", idx_folder, target)
    assert target.read_bytes() == before
    file.write_bytes(whole)
    target.write_bytes(before[:-1])
    convert("mnist", idx_folder, target)
    assert target.stat().st_size == len(before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["idx", "store.h5"]


def test_a_file_that_is_no_store_stays(tmp_path: Path, idx_folder: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("mine")
    with pytest.raises(UserError, match=r"job\.toml: there already, and no dataset file"):
        convert("mnist", idx_folder, file)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_nothing_is_left_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    def blocks() -> Iterator[Block]:
        yield Block("train", 0, np.zeros((1, 1, 2, 2), np.uint8), np.zeros(1, np.uint8))
        raise interruption

    images = Images((1, 2, 2), ("zero",), 255.0, {"train": 2, "test": 1}, blocks())
    monkeypatch.setitem(READERS, "broken", lambda source: images)
    with pytest.raises((interruption, UserError)):
        convert("broken", None, tmp_path / "store.h5")
    assert not list(tmp_path.iterdir())


def test_a_full_disk(tmp_path: Path, idx_folder: Path) -> None:
    with full_after(2000), pytest.raises(UserError, match=r"store.h5: cannot be written"):
        convert("mnist", idx_folder, tmp_path / "store.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["idx"]


def test_a_constant_channel_has_unit_deviation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    black = Block("train", 0, np.zeros((3, 1, 2, 2), np.uint8), np.zeros(3, np.uint8))
    images = Images((1, 2, 2), ("zero",), 255.0, {"train": 3}, iter([black]))
    monkeypatch.setitem(READERS, "black", lambda source: images)
    header = convert("black", None, tmp_path / "store.h5").header
    assert (header.mean, header.std) == ((0.0,), (1.0,))
