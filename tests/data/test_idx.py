from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcsgd.data import convert
from hpcsgd.errors import UserError

IMAGES = "train-images-idx3-ubyte.gz"
LABELS = "train-labels-idx1-ubyte.gz"


def rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(gzip.compress(change(gzip.decompress(file.read_bytes())), mtime=0))


def test_what_is_stored(tmp_path: Path, idx_folder: Path) -> None:
    summary = convert("mnist", idx_folder, tmp_path / "small.h5")
    assert summary.rows == {"train": 23, "test": 5}
    assert summary.header.shape == (1, 5, 3)
    with h5py.File(tmp_path / "small.h5") as file:
        images = np.asarray(file["train/x"])
        assert images.tobytes() == gzip.decompress((idx_folder / IMAGES).read_bytes())[16:]
        assert (
            np.asarray(file["train/y"]).tobytes() == gzip.decompress((idx_folder / LABELS).read_bytes())[8:]
        )
    np.testing.assert_allclose(summary.header.mean, (images / 255).mean())
    np.testing.assert_allclose(summary.header.std, (images / 255).std())


def test_uncompressed_and_under_the_other_name(tmp_path: Path, idx_folder: Path) -> None:
    convert("mnist", idx_folder, tmp_path / "gzipped.h5")
    for file in list(idx_folder.iterdir()):
        (idx_folder / file.stem.replace("-idx", ".idx")).write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    convert("mnist", idx_folder, tmp_path / "plain.h5")
    with h5py.File(tmp_path / "gzipped.h5") as one, h5py.File(tmp_path / "plain.h5") as other:
        np.testing.assert_array_equal(np.asarray(one["train/x"]), np.asarray(other["train/x"]))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (IMAGES, lambda data: b"\0\0\x08\x01" + data[4:], "byte 0: not an idx file of bytes in 3 dimensions"),
        (LABELS, lambda data: b"\0\0\x0d\x01" + data[4:], "byte 0: not an idx file of bytes in 1 dimensions"),
        (IMAGES, lambda data: data[:10], "byte 10: the file ends here, 2 bytes short of the idx header"),
        (
            IMAGES,
            lambda data: data[:-2],
            "byte 359: the file ends here, 2 bytes short of images 0 to 22 of 23",
        ),
        (
            LABELS,
            lambda data: data[:-1],
            "byte 30: the file ends here, 1 bytes short of labels 0 to 22 of 23",
        ),
        (IMAGES, lambda data: data + b"\0", "byte 361: the file of 23 images should end here, but more"),
        (LABELS, lambda data: data[:7] + b"\x16" + data[8:], "byte 4: says 22 labels"),
        (LABELS, lambda data: data[:9] + b"\x0a" + data[10:], "byte 9: label 10 is not below 10"),
        (IMAGES, lambda data: data[:8] + bytes(4) + data[12:], "byte 4: nothing in it"),
        (IMAGES, lambda data: data[:11] + b"\x06" + data[12:], "differ in size"),
    ],
)
def test_damaged_files(
    tmp_path: Path, idx_folder: Path, name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    rewrite(idx_folder / name, change)
    with pytest.raises(UserError) as caught:
        convert("mnist", idx_folder, tmp_path / "small.h5")
    assert message in str(caught.value)
    assert str(idx_folder) in str(caught.value)
    assert not list(tmp_path.glob("*small.h5*"))


@pytest.mark.parametrize("change", [lambda data: data[:-3], lambda data: data[:-8] + bytes(4) + data[-4:]])
def test_damaged_gzip(tmp_path: Path, idx_folder: Path, change: Callable[[bytes], bytes]) -> None:
    file = idx_folder / IMAGES
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UserError, match=r"byte \d+: damaged or truncated after this point") as caught:
        convert("mnist", idx_folder, tmp_path / "small.h5")
    assert str(file) in str(caught.value)


def test_a_missing_file(tmp_path: Path, idx_folder: Path) -> None:
    (idx_folder / LABELS).unlink()
    with pytest.raises(UserError, match=f"missing {LABELS}"):
        convert("mnist", idx_folder, tmp_path / "small.h5")


@pytest.mark.slow
def test_real_mnist(tmp_path: Path, real_data: Callable[[str], Path]) -> None:
    summary = convert("mnist", real_data("mnist"), tmp_path / "mnist.h5")
    assert summary.rows == {"train": 60_000, "test": 10_000}
    np.testing.assert_allclose([*summary.header.mean, *summary.header.std], [0.1307, 0.3081], atol=1e-4)
    with h5py.File(tmp_path / "mnist.h5") as file:
        assert np.asarray(file["train/y"])[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
        assert np.bincount(np.asarray(file["train/y"])).min() == 5421
