from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hpcsgd.data import Arrays, AsRank, Loader, Sampler, convert_npz, open_split
from hpcsgd.errors import UserError
from hpcsgd.train.tasks import Classification, task_of

Data = tuple[NDArray[Any], NDArray[np.int64]]


def drawn(n: int, *shape: int, dtype: type[np.generic] = np.float32) -> Data:
    """Return n random samples and their labels, of three classes."""
    chance = np.random.default_rng(n)
    return chance.integers(0, 256, (n, *shape)).astype(dtype), np.arange(n) % 3


def saved(path: Path, x: NDArray[np.generic], y: NDArray[np.generic]) -> Path:
    np.savez(path, x=x, y=y)
    return path


@pytest.mark.parametrize("shape", [(5,), (3, 8, 8), (2,)])
@pytest.mark.parametrize("dtype", [np.float64, np.int16, np.uint8])
def test_arrays_come_back(tmp_path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
    (x, y), (u, v) = drawn(20, *shape, dtype=dtype), drawn(9, *shape, dtype=dtype)
    files = [saved(tmp_path / "train.npz", x, y), saved(tmp_path / "test.npz", u, v)]
    summary = convert_npz(files, tmp_path / "own.h5")
    assert summary.rows == {"train": 20, "test": 9}
    assert f"20 train, 9 test, samples of shape {list(shape)}, 3 classes" in str(summary)
    train = open_split(tmp_path / "own.h5", "train")
    assert isinstance(train, Arrays)
    batch = train.__getitems__([7, 0, 19])
    expected = torch.from_numpy(x[[7, 0, 19]].astype(np.float32)) / (255 if dtype is np.uint8 else 1)
    assert torch.equal(batch.x, expected)
    assert batch.y.tolist() == y[[7, 0, 19]].tolist()
    assert batch.y.dtype == torch.int64
    assert train.shape == shape
    assert train.labels.tolist() == y.tolist()
    assert isinstance(task_of(train), Classification)
    assert len(open_split(tmp_path / "own.h5", "test")) == 9


def test_of_one_file_each_tenth_of_a_class_is_to_test_on(tmp_path: Path) -> None:
    x, _ = drawn(45, 2)
    y = np.array([0] * 25 + [1] * 15 + [2] * 5)
    convert_npz([saved(tmp_path / "a.npz", x, y)], tmp_path / "own.h5")
    test = Arrays(tmp_path / "own.h5", "test")
    assert torch.equal(test.__getitems__([0, 1, 2]).x, torch.from_numpy(x[[9, 19, 34]]))
    assert test.labels.tolist() == [0, 0, 1]
    assert len(Arrays(tmp_path / "own.h5", "train")) == 42
    assert test.classes == ("0", "1", "2")


def test_what_is_damaged_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "own.h5"
    x, y = drawn(60, 4)
    convert_npz([saved(tmp_path / "a.npz", x, y)], path)
    content = bytearray(path.read_bytes())
    at = content.find(x[0].tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="rows 0 do not match their checksums") as here:
        Arrays(path, "train")[0]
    data = Arrays(path, "train")
    with pytest.raises(UserError) as in_another_process:
        list(Loader(data, 8, Sampler(data, AsRank(0, 1)), num_workers=1))
    assert str(in_another_process.value) == str(here.value)


X, Y = drawn(30, 2)
CASES = {
    "no such file": None,
    r"no array 'x' in it, but a, y: numpy\.savez": {"a": X, "y": Y},
    r"no array 'y' in it, but x": {"x": X},
    r"x has shape \[30\]: a row for each sample": {"x": X[:, 0], "y": Y},
    r"y has shape \[29\]: one label for each of 30 samples": {"x": X, "y": Y[1:]},
    r"y has shape \[30, 1\]": {"x": X, "y": Y[:, None]},
    "x is of <U1: numbers are needed": {"x": X.astype("U1"), "y": Y},
    "y is of float64: classes are whole numbers": {"x": X, "y": Y / 2},
    "y: sample 0 has the label -1: classes begin with 0": {"x": X, "y": Y - 1},
    "x: sample 3 has a value that is not finite": {
        "x": np.where(np.arange(30)[:, None] == 3, np.nan, X),
        "y": Y,
    },
    r"x: sample 4 has a whole number beyond ±16,777,216, which float32 may round": {
        "x": np.where(np.arange(30)[:, None] == 4, 2**24 + 1, X.astype(np.int64)),
        "y": Y,
    },
    r"x: sample 2 has a whole number beyond": {
        "x": np.where(np.arange(30)[:, None] == 2, np.uint32(2**32 - 1), X.astype(np.uint32)),
        "y": Y,
    },
    r"y: sample 29 has the label 18446744073709551615: classes are 0, 1, 2, … up to 9,999,999": {
        "x": X,
        "y": np.where(np.arange(30) == 29, np.uint64(2**64 - 1), Y.astype(np.uint64)),
    },
    "no file of numpy.savez, or damaged": {"x": np.array([{}], dtype=object), "y": Y},
}


@pytest.mark.parametrize("message", CASES)
def test_what_cannot_be_is_one_line(tmp_path: Path, message: str) -> None:
    file = tmp_path / "own.npz"
    if (arrays := CASES[message]) is not None:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=rf"own\.npz: .*{message}|own\.npz: {message}") as caught:
        convert_npz([file], tmp_path / "own.h5")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "own.h5").exists()


def test_files_that_are_none(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", X)
    with pytest.raises(UserError, match=r"a single array: write both by numpy\.savez"):
        convert_npz([tmp_path / "one.npy"], tmp_path / "own.h5")
    (tmp_path / "cut.npz").write_bytes(b"PK\3\4 and no more")
    with pytest.raises(UserError, match="damaged"):
        convert_npz([tmp_path / "cut.npz"], tmp_path / "own.h5")


def test_damage_inside_compressed_arrays(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "whole.npz", x=X, y=Y)
    whole = (tmp_path / "whole.npz").read_bytes()
    for at in range(0, len(whole), 7):
        (tmp_path / "a.npz").write_bytes(whole[:at] + bytes([whole[at] ^ 0x3C]) + whole[at + 1 :])
        with suppress(UserError):  # and no other exception
            convert_npz([tmp_path / "a.npz"], tmp_path / "own.h5")


def test_one_file_to_train_and_to_test_on(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.npz", *drawn(30, 2))
    assert convert_npz([file, file], tmp_path / "own.h5").rows == {"train": 30, "test": 30}
    with pytest.raises(UserError, match="0 files given"):
        convert_npz([], tmp_path / "own.h5")


def test_the_largest_numbers_that_float32_holds(tmp_path: Path) -> None:
    x = np.array([[-(2**24)], [2**24]])
    files = [saved(tmp_path / "a.npz", x, np.arange(2)), saved(tmp_path / "b.npz", x, np.arange(2))]
    convert_npz(files, tmp_path / "own.h5")
    assert Arrays(tmp_path / "own.h5", "train").__getitems__([0, 1]).x.tolist() == x.tolist()


def test_files_that_do_not_fit_each_other(tmp_path: Path) -> None:
    files = [saved(tmp_path / "a.npz", *drawn(30, 2)), saved(tmp_path / "b.npz", *drawn(30, 3))]
    with pytest.raises(UserError, match=r"differ in shape: \[2\] in .*a\.npz and \[3\] in .*b\.npz"):
        convert_npz(files, tmp_path / "own.h5")
    with pytest.raises(UserError, match="3 files given"):
        convert_npz([*files, files[0]], tmp_path / "own.h5")


def test_too_few_to_hold_some_out(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.npz", *drawn(9, 2))
    with pytest.raises(UserError, match="no class has 10 samples"):
        convert_npz([file], tmp_path / "own.h5")


def test_a_file_that_is_no_store_stays(tmp_path: Path) -> None:
    files = [saved(tmp_path / "a.npz", *drawn(30, 2)), saved(tmp_path / "b.npz", *drawn(30, 2))]
    with pytest.raises(UserError, match="there already, and no dataset file"):
        convert_npz([files[0]], files[1])
