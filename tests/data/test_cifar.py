from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hpcsgd.data import READERS, convert
from hpcsgd.data.formats.cifar import CIFAR10, CIFAR100, PIXELS, Layout
from hpcsgd.errors import UserError

pytestmark = pytest.mark.usefixtures("small_cifar")

Records = dict[str, NDArray[np.uint8]]


def content(store: Path) -> dict[str, bytes]:
    with h5py.File(store) as file:
        return {name: np.asarray(file[name]).tobytes() for name in ("train/x", "train/y", "test/x", "test/y")}


def expected(records: Records) -> dict[str, bytes]:
    train = np.concatenate([records["data_batch_1"], records["data_batch_2"]])
    splits = {"train": train, "test": records["test_batch"]}
    images = {f"{name}/x": rows[:, 2:].tobytes() for name, rows in splits.items()}
    return images | {f"{name}/y": rows[:, 1].tobytes() for name, rows in splits.items()}


def python_batch(rows: NDArray[np.uint8], **changes: Any) -> dict[Any, Any]:
    whole = {"data": rows[:, 2:], "coarse_labels": rows[:, 0].tolist(), "fine_labels": rows[:, 1].tolist()}
    return whole | changes


def archive(folder: Path, compression: str, order: Callable[[list[Path]], list[Path]] = sorted) -> Path:
    path = folder.parent / "small.tar"
    opener: Callable[..., tarfile.TarFile] = tarfile.open
    with opener(path, f"w:{compression}") as tar:
        for file in order(list(folder.iterdir())):
            tar.add(file, f"small-bin/{file.name}")
    return path


def test_a_folder_of_binary_batches(tmp_path: Path, binary_folder: Path, records: Records) -> None:
    summary = convert("small", binary_folder, tmp_path / "small.h5")
    assert content(tmp_path / "small.h5") == expected(records)
    assert summary.rows == {"train": 14, "test": 7}
    assert summary.header.shape == (3, 32, 32)


@pytest.mark.parametrize("compression", ["", "gz", "xz", "bz2"])
def test_an_archive_in_any_order(
    tmp_path: Path, binary_folder: Path, records: Records, compression: str
) -> None:
    source = archive(binary_folder, compression, lambda files: sorted(files, reverse=True))
    convert("small", source, tmp_path / "small.h5")
    assert content(tmp_path / "small.h5") == expected(records)


@pytest.mark.parametrize("text", [str, str.encode], ids=["text keys", "Python 2 keys"])
def test_python_batches_one_folder_below(
    tmp_path: Path, records: Records, text: Callable[[str], str | bytes]
) -> None:
    folder = tmp_path / "source" / "small-py"
    folder.mkdir(parents=True)
    for name, rows in records.items():
        batch = {text(key): value for key, value in python_batch(rows).items()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    convert("small", folder.parent, tmp_path / "small.h5")
    assert content(tmp_path / "small.h5") == expected(records)


def test_the_real_layouts() -> None:
    assert READERS.keys() >= {"cifar10", "cifar100", "mnist", "digits"}
    for layout, classes in ((CIFAR10, 10), (CIFAR100, 100)):
        assert len(set(layout.classes)) == classes == layout.labels[-1].classes
        assert sum(batch.count for batch in layout.batches) == 60_000
    assert len(CIFAR10.labels) + PIXELS == 3073
    assert len(CIFAR100.labels) + PIXELS == 3074


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "byte 21517: the file ends here, 1 bytes short of records 0 to 6 of 7"),
        (lambda data: data[: 3074 * 6], "byte 18444: the file ends here, 3074 bytes short"),
        (lambda data: data + b"\0", "byte 21518: the batch of 7 records should end here, but more"),
        (lambda data: data[: 3074 * 2] + b"\3" + data[3074 * 2 + 1 :], "byte 6148: coarse_label 3 is not"),
        (lambda data: data[:1] + b"\xff" + data[2:], "byte 1: fine_label 255 is not below 10"),
    ],
)
def test_a_damaged_binary_batch(
    tmp_path: Path, binary_folder: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    file = binary_folder / "data_batch_2.bin"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError) as caught:
        convert("small", binary_folder, tmp_path / "small.h5")
    assert f"{file}: {message}" in str(caught.value)
    assert not list(tmp_path.glob("*small.h5*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": np.zeros((6, PIXELS), np.uint8)},
            r"'data' should be uint8 \[7, 3072\], not uint8 \[6, 3072\]",
        ),
        ({"data": b"pixels"}, r"'data' should be uint8 \[7, 3072\], not bytes"),
        ({"fine_labels": [1] * 6}, "'fine_labels' should list 7 numbers, not a list of 6"),
        ({"fine_labels": None}, "'fine_labels' should list 7 numbers, not NoneType"),
        ({"fine_labels": [0, 1, 10, 0, 0, 0, 0]}, "image 2: fine_label 10 is not below 10"),
        ({"coarse_labels": [-1, 1, 1, 0, 0, 0, 0]}, "image 0: coarse_label -1 is not below 3"),
    ],
)
def test_a_wrong_python_batch(
    tmp_path: Path, records: Records, changes: dict[str, Any], message: str
) -> None:
    file = tmp_path / "data_batch_1"
    file.write_bytes(pickle.dumps(python_batch(records["data_batch_1"], **changes)))
    with pytest.raises(UserError, match=message) as caught:
        convert("small", tmp_path, tmp_path / "small.h5")
    assert str(file) in str(caught.value)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("touched"),)


@pytest.mark.parametrize("evil", [Evil(), {"data": Evil()}, {"data": np.array([Evil()], dtype=object)}])
def test_a_pickle_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(evil))
    with pytest.raises(UserError, match="which no data file needs"):
        convert("small", tmp_path, tmp_path / "small.h5")
    assert not (tmp_path / "touched").exists()


def test_a_truncated_pickle_names_the_byte(tmp_path: Path, records: Records) -> None:
    whole = pickle.dumps(python_batch(records["data_batch_1"]))
    (tmp_path / "data_batch_1").write_bytes(whole[:-5])
    with pytest.raises(UserError, match=r"data_batch_1: byte \d+: not a pickle"):
        convert("small", tmp_path, tmp_path / "small.h5")


def test_missing_and_doubled_batches(tmp_path: Path, binary_folder: Path) -> None:
    (binary_folder / "test_batch.bin").unlink()
    with pytest.raises(UserError, match="missing test_batch"):
        convert("small", binary_folder, tmp_path / "small.h5")
    (binary_folder / "copy").mkdir()
    (binary_folder / "copy" / "data_batch_1.bin").write_bytes(
        (binary_folder / "data_batch_1.bin").read_bytes()
    )
    with pytest.raises(UserError, match="data_batch_1 is there twice"):
        convert("small", binary_folder, tmp_path / "small.h5")


def test_neither_archive_nor_folder(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("not an archive")
    with pytest.raises(UserError, match="not a tar archive"):
        convert("small", tmp_path / "notes", tmp_path / "small.h5")
    with pytest.raises(UserError, match="no such file or folder"):
        convert("small", tmp_path / "nowhere", tmp_path / "small.h5")
    with pytest.raises(UserError, match="no source given"):
        convert("small", None, tmp_path / "small.h5")


@pytest.mark.parametrize("compression", ["gz", "xz"])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_archive_is_refused_or_read_right(
    tmp_path: Path,
    binary_folder: Path,
    records: Records,
    compression: str,
    data: st.DataObject,
) -> None:
    source = archive(binary_folder, compression)
    damaged = io.BytesIO(source.read_bytes())
    place = data.draw(st.integers(0, len(damaged.getvalue()) - 1))
    if data.draw(st.booleans()):
        damaged.truncate(place)
    else:
        damaged.getbuffer()[place] ^= data.draw(st.integers(1, 255))
    source.write_bytes(damaged.getvalue())
    target = tmp_path / "damaged.h5"
    try:
        convert("small", source, target)
    except UserError as refusal:
        message = str(refusal)
        assert not list(tmp_path.glob("*damaged.h5*"))
    else:
        message = str(source)
        assert content(target) == expected(records)
        target.unlink()
    assert str(source) in message


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_archive(tmp_path: Path, real_data: Callable[[str], Path]) -> None:
    source = real_data("cifar-10") / "cifar-10-binary.tar.xz"
    summary = convert("cifar10", source, tmp_path / "cifar10.h5")
    assert summary.rows == {"train": 50_000, "test": 10_000}
    np.testing.assert_allclose(summary.header.mean, [0.4914, 0.4822, 0.4465], atol=1e-4)
    np.testing.assert_allclose(summary.header.std, [0.2470, 0.2435, 0.2616], atol=1e-4)
    with h5py.File(tmp_path / "cifar10.h5") as file:
        assert np.bincount(np.asarray(file["train/y"])).tolist() == [5000] * 10
        assert np.bincount(np.asarray(file["test/y"])).tolist() == [1000] * 10
        assert np.asarray(file["test/y"])[:4].tolist() == [3, 8, 8, 0]


def test_layouts_fill_their_splits() -> None:
    def rows(layout: Layout, split: str) -> list[int]:
        return [
            row
            for batch in layout.batches
            if batch.split == split
            for row in range(batch.start, batch.start + batch.count)
        ]

    for layout in (CIFAR10, CIFAR100):
        assert rows(layout, "train") == list(range(50_000))
        assert rows(layout, "test") == list(range(10_000))
