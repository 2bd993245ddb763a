from __future__ import annotations

import errno
import os
import pickle
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

import programs
from data.pictures import noise, save, write_classes
from hpcsgd.data import AsRank, Batches, ImageFiles, Loader, Sampler, convert_images, decoding, image_folder
from hpcsgd.data.decoding import DRAWS
from hpcsgd.data.image_shards import folder_of
from hpcsgd.data.split import Drawn
from hpcsgd.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "pictures")


@pytest.fixture
def path(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a dataset file with shards of about two images each."""
    monkeypatch.setattr(image_folder, "SHARD", 900)
    convert_images(folder, tmp_path / "store.h5", size=14)
    return tmp_path / "store.h5"


def files(folder: Path, split: str) -> list[Path]:
    return sorted((folder / split).glob("*/*"))


def opened(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_the_bytes_of_the_files_are_kept(path: Path, folder: Path) -> None:
    """The dataset file, read by h5py alone, holds the bytes, checksums and labels of the image files."""
    for split, there in (("train", "train"), ("test", "val")):
        with h5py.File(path) as store:
            columns: dict[str, Any] = {name: np.asarray(store[f"{split}/{name}"]) for name in store[split]}  # pyright: ignore[reportGeneralTypeIssues]
        found = []
        for i, shard in enumerate(columns["shard"]):
            with h5py.File(folder_of(path) / columns["shards"][shard].decode()) as file:
                begin, length = int(columns["begin"][i]), int(columns["length"][i])
                found.append(np.asarray(file["x"])[begin : begin + length].tobytes())
        assert found == [each.read_bytes() for each in files(folder, there)]
        assert columns["crc32"].tolist() == [zlib.crc32(content) for content in found]
        assert columns["y"].tolist() == [int(each.parent.name == "dog") for each in files(folder, there)]
        assert len(set(columns["shard"].tolist())) > 2


def test_the_middle_of_what_is_tested_on(path: Path, folder: Path) -> None:
    """The test images are cropped to 7/8 of 16 pixels, which is 14, so that they need no resizing."""
    train = np.concatenate([opened(each).reshape(-1, 3) for each in files(folder, "train")]) / 255
    data = ImageFiles(path, "test")
    assert (data.shape, data.classes, len(data)) == ((3, 14, 14), ("cat", "dog"), 6)
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    batch = data.__getitems__([5, 0])
    for x, each in zip(batch.x, (files(folder, "val")[i] for i in (5, 0)), strict=True):
        pixels = (opened(each)[1:15, 1:15] / 255 - train.mean(0)) / train.std(0)
        torch.testing.assert_close(x, torch.from_numpy(pixels.transpose(2, 0, 1)).float())
    assert batch.y.tolist() == [1, 0]
    assert (batch.x.dtype, batch.y.dtype) == (torch.float32, torch.int64)
    assert ImageFiles(path, "test", size=5)[0][0].shape == (3, 5, 5)


def test_a_whole_image_mirrored_or_not(path: Path, folder: Path) -> None:
    """With `smallest = 1` the only possible crop is the whole image of 16 x 16."""
    data = ImageFiles(path, "train", size=16, smallest=1)
    square = [i for i, each in enumerate(files(folder, "train")) if opened(each).shape[1] == 16]
    mirrored = []
    for epoch in range(12):
        rows = Drawn(square, 3, epoch)
        plain = ImageFiles(path, "train", size=16, smallest=1)
        for row, x in zip(rows, data.__getitems__(rows).x, strict=True):
            pixels = torch.from_numpy(opened(files(folder, "train")[row]).copy()).permute(2, 0, 1).float()
            expected = pixels * plain._gain - plain._shift
            mirror = not torch.allclose(x, expected, atol=1e-5)
            torch.testing.assert_close(x, expected.flip(2) if mirror else expected, atol=1e-5, rtol=1e-5)
            mirrored.append(mirror)
    assert 0.3 < sum(mirrored) / len(mirrored) < 0.7


@given(
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.floats(0.05, 1),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=DRAWS, max_size=DRAWS),
)
def test_a_random_piece_is_of_the_image(size: tuple[int, int], smallest: float, draws: list[float]) -> None:
    left, top, right, bottom = decoding._random_box(size, smallest, draws)
    assert 0 <= left < right <= size[0] + 1e-9
    assert 0 <= top < bottom <= size[1] + 1e-9
    w, h = right - left, bottom - top
    if all(isinstance(side, int) for side in (left, top, right, bottom)):
        assert abs((w + 0.5) * (h + 0.5)) >= smallest * size[0] * size[1] - (w + h)
        assert (w - 0.5) / (h + 0.5) <= 4 / 3 + 1e-9
        assert (w + 0.5) / (h - 0.5) >= 3 / 4 - 1e-9


def seen(path: Path, P: int, K: int, epoch: int, workers: int = 0, seed: int = 5) -> dict[int, bytes]:
    """Return the content of each sample that the ranks read in an epoch.

    A group takes batches of 4, or of 3 if it has 3 ranks.
    """
    data, found = ImageFiles(path, "train", size=9), {}
    for rank in range(P * K):
        sampler = Sampler(data, AsRank(rank, P * K, K), seed=seed)
        sampler.set_epoch(epoch)
        batches = Batches(sampler, max(1, 4 // K))
        rows = [row for batch in batches for row in batch]
        reading = DataLoader(data, batch_sampler=batches, collate_fn=data.collate, num_workers=workers)
        x = torch.cat([x for x, _ in reading])
        found |= {row: each.numpy().tobytes() for row, each in zip(rows, x, strict=True)}
    return found


@pytest.mark.parametrize(("P", "K", "workers"), [(1, 4, 0), (2, 2, 0), (3, 1, 0), (4, 1, 0), (1, 2, 2)])
def test_pieces_are_the_same_for_any_ranks_and_workers(path: Path, P: int, K: int, workers: int) -> None:
    assert len(seen(path, 1, 1, 2)) == 12
    assert seen(path, P, K, 2, workers) == seen(path, 1, 1, 2)


def test_other_epochs_and_seeds_have_other_pieces(path: Path) -> None:
    for other in (seen(path, 1, 1, 3), seen(path, 1, 1, 2, seed=6)):
        alike = [row for row, x in seen(path, 1, 1, 2).items() if other[row] == x]
        assert len(alike) <= 1


def test_a_loader_goes_on_with_the_same_pieces(path: Path) -> None:
    def loader() -> Loader:
        data = ImageFiles(path, "train", size=9)
        return Loader(data, 3, Sampler(data, AsRank(1, 2), seed=7))

    whole, begun = loader(), loader()
    expected = [x for _ in range(2) for x, _ in whole]
    next(iter(begun))
    resumed = loader()
    resumed.load_state_dict(begun.state_dict())
    rest = [x for _ in range(2) for x, _ in resumed]
    assert len(expected) == 4
    assert all(torch.equal(a, b) for a, b in zip(rest, expected[1:], strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_varies_what_is_inside_other_datasets(path: Path, workers: int) -> None:
    whole = ImageFiles(path, "train")
    rows = list(range(len(whole)))

    def read(data: Dataset[Any]) -> list[Any]:
        loader = Loader(data, 3, Sampler(data, AsRank(0, 1), seed=5), num_workers=workers)  # pyright: ignore[reportArgumentType]
        return [x for x, _ in loader]

    expected = read(whole)
    assert not torch.equal(expected[0], whole.__getitems__(list(Sampler(whole, AsRank(0, 1), seed=5))[:3]).x)
    for data in (Subset(whole, rows), ConcatDataset([whole]), Subset(Subset(whole, rows), rows)):
        assert all(torch.equal(x, y) for x, y in zip(read(data), expected, strict=True))
    assert torch.equal(Subset(whole, rows)[0][0], whole[0][0])


def test_crosses_processes(path: Path) -> None:
    data = ImageFiles(path, "train")
    first = data[0][0]
    assert torch.equal(pickle.loads(pickle.dumps(data))[0][0], first)


def test_images_of_all_modes(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "pictures", each=2)
    image = Image.fromarray(noise(np.random.default_rng(1), 16, 16))
    image.convert("L").save(folder / "val/cat/grey.png")
    image.convert("CMYK").save(folder / "val/cat/cmyk.jpg")
    image.convert("RGBA").save(folder / "val/cat/alpha.png")
    image.convert("P").save(folder / "val/cat/palette.png", transparency=bytes(range(256)))
    convert_images(folder, tmp_path / "store.h5", size=14)
    assert ImageFiles(tmp_path / "store.h5", "test").__getitems__(range(6)).x.isfinite().all()


def content(path: Path) -> dict[str, bytes]:
    """Return everything that a dataset file and its shards contain."""
    found: dict[str, bytes] = {}
    for file in [path, *sorted(folder_of(path).iterdir())]:
        with h5py.File(file, locking=False) as hdf5:
            label = "" if file == path else file.name
            names: list[str] = []
            hdf5.visit(names.append)
            values: dict[str, Any] = {name: hdf5[name] for name in names}
            datasets = {name: value for name, value in values.items() if isinstance(value, h5py.Dataset)}
            found |= {f"{label}/{name}": np.asarray(value).tobytes() for name, value in datasets.items()}
            found |= {f"{label} {key}": np.asarray(value).tobytes() for key, value in hdf5.attrs.items()}
    return found


KILLED = """
import os, signal, sys
from pathlib import Path
from hpcsgd.data import convert_images, image_folder
image_folder.SHARD = 900
def told(done, everything):
    if done >= 6:
        os.kill(os.getpid(), signal.SIGKILL)
convert_images(Path(sys.argv[1]), Path(sys.argv[2]), 14, told)
"""


@pytest.mark.slow
def test_what_was_complete_before_a_kill_stays(tmp_path: Path, folder: Path, path: Path) -> None:
    target = tmp_path / "again.h5"
    done = programs.run([sys.executable, "-c", KILLED, folder, target], check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not target.exists()
    left = {each.name: each.stat().st_ino for each in folder_of(target).glob("*.h5")}
    assert 1 < len(left) < len(list(folder_of(path).iterdir()))
    (folder_of(target) / ".half.h5.1234.part").write_bytes(b"half")
    told: list[tuple[int, int]] = []
    convert_images(folder, target, 14, lambda *numbers: told.append(numbers))
    assert {name: (folder_of(target) / name).stat().st_ino for name in left} == left
    assert content(target) == content(path)
    assert told[-1] == (18, 18)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert sorted(each.name for each in folder_of(target).iterdir()) == sorted(
        each.name for each in folder_of(path).iterdir()
    )


def test_a_shard_that_is_cut_off_is_found_and_written_again(folder: Path, path: Path) -> None:
    before = content(path)
    shard = sorted(folder_of(path).iterdir())[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    data = ImageFiles(path, "train")
    with pytest.raises(
        UserError, match=rf"image \d+: .*{shard.name}: damaged or cut off .*convert the folder"
    ):
        for some in (data, ImageFiles(path, "test")):
            some.__getitems__(range(len(some)))
    convert_images(folder, path, 14)
    assert content(path) == before


def test_an_old_store_stays_until_changed_files_are_converted(folder: Path, path: Path) -> None:
    before, shards = content(path), set(folder_of(path).iterdir())
    good = (folder / "train/dog/1.png").read_bytes()
    (folder / "train/dog/1.png").write_bytes(good[: len(good) // 2])
    with pytest.raises(UserError, match=r"train/dog/1\.png: a broken image"):
        convert_images(folder, path, 14)
    assert ImageFiles(path, "train").__getitems__(range(12)).x.isfinite().all()
    assert {name: value for name, value in content(path).items() if name in before} == before
    save(folder / "train/dog/1.png", noise(np.random.default_rng(9), 18, 18))
    convert_images(folder, path, 14)
    now = set(folder_of(path).iterdir())
    assert now - shards
    assert shards - now
    assert now & shards
    assert ImageFiles(path, "train").__getitems__(range(12)).x.isfinite().all()


def test_a_damaged_byte_is_found(path: Path) -> None:
    data = ImageFiles(path, "train")
    with h5py.File(path) as store:
        name = np.asarray(store["train/shards"])[0].decode()
    with h5py.File(folder_of(path) / name) as shard:
        place = shard["x"].id.get_offset()  # pyright: ignore[reportAttributeAccessIssue]
    damaged = bytearray((folder_of(path) / name).read_bytes())
    damaged[place + 50] ^= 1
    (folder_of(path) / name).write_bytes(damaged)
    with pytest.raises(
        UserError, match=rf"'train', image 0: .*{name}: the image at byte 0 does not match its"
    ):
        data[0]


def test_a_missing_shard_is_reported_before_training(path: Path) -> None:
    next(iter(folder_of(path).iterdir())).unlink()
    with pytest.raises(
        UserError, match=r"store\.h5\.shards: \d of \d shards of the dataset file are missing"
    ):
        for split in ("train", "test"):
            ImageFiles(path, split)


def remove(place: Path) -> None:
    for each in place.iterdir():
        remove(each) if each.is_dir() else each.unlink()
    place.rmdir()


BAD: dict[str, tuple[Any, str]] = {
    "no folder": (remove, r"pictures: no such file or folder; a folder with train/ and val/ is needed"),
    "no train": (
        lambda f: (f / "train").rename(f / "training"),
        r"pictures: no folder train/ in it, with",
    ),
    "no val": (
        lambda f: remove(f / "val"),
        r"no folder val/ or valid/ or test/ in it, with the images",
    ),
    "no classes": (
        lambda f: [remove(f / "train" / name) for name in ("cat", "dog")],
        "pictures/train: no class folders in it",
    ),
    "an empty class": (lambda f: (f / "train/emu").mkdir(), "pictures/train/emu: an empty class folder"),
    "an unknown class": (
        lambda f: save(f / "val/emu/0.png", np.zeros((8, 8, 3), np.uint8)),
        "val/emu: there is no such class in .*train",
    ),
    "a loose file": (
        lambda f: save(f / "train/0.png", np.zeros((8, 8, 3), np.uint8)),
        r"train/0\.png: not in the folder of a class",
    ),
    "a class in Latin-1": (
        lambda f: os.rename(os.fsencode(f / "train/dog"), os.fsencode(f / "train") + b"/d\xf6g"),
        r"train/d\udcf6g: not UTF-8: give another name",
    ),
    "another format": (
        lambda f: (f / "train/cat/notes.txt").write_text("x"),
        r"cat/notes\.txt: not an image; allowed here are files in \.jpeg, \.jpg, \.png",
    ),
    "a folder in a class": (
        lambda f: (f / "train/cat/more.png").mkdir(),
        r"more\.png: not an image",
    ),
    "no image": (
        lambda f: (f / "train/cat/9.jpg").write_text("no image"),
        r"train/cat/9\.jpg: neither JPEG nor PNG, or damaged where it begins",
    ),
    "empty": (lambda f: (f / "train/cat/9.jpg").write_bytes(b""), r"train/cat/9\.jpg: neither JPEG nor PNG"),
    "16 bits": (
        lambda f: save(f / "val/dog/9.png", np.full((8, 8), 4000, np.uint16)),
        r"val/dog/9\.png: a grey image of 16 bits, and samples have 8",
    ),
    "cut off": (
        lambda f: (f / "val/dog/0.JPEG").write_bytes((f / "val/dog/0.JPEG").read_bytes()[:-40]),
        r"val/dog/0\.JPEG: a broken image \(image file is truncated",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_folders_that_cannot_be_converted(tmp_path: Path, folder: Path, name: str) -> None:
    spoil, message = BAD[name]
    spoil(folder)
    with pytest.raises(UserError, match=message) as caught:
        convert_images(folder, tmp_path / "store.h5")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store.h5").exists()


def test_hidden_files_are_passed_over(tmp_path: Path, folder: Path) -> None:
    for place in (folder, folder / "train", folder / "train/cat"):
        (place / ".DS_Store").write_bytes(b"x")
    assert convert_images(folder, tmp_path / "store.h5").rows == {"train": 12, "test": 6}


def test_a_folder_that_cannot_be_listed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match=r"^\S*/train: cannot be read \(Permission denied\)$"):
        convert_images(folder, tmp_path / "other.h5")


def test_arguments_that_cannot_be(tmp_path: Path, folder: Path, path: Path) -> None:
    with pytest.raises(UserError, match="size = 0: a sample has 1 to 16384 pixels a side"):
        convert_images(folder, tmp_path / "other.h5", size=0)
    with pytest.raises(UserError, match="size = -3"):
        ImageFiles(path, "train", size=-3)
    with pytest.raises(UserError, match="smallest = 0: must be more than 0 and at most 1"):
        ImageFiles(path, "train", smallest=0)
    with pytest.raises(UserError, match="no split 'val'; Allowed: test, train"):
        ImageFiles(path, "val")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt: there already, and no dataset file"):
        convert_images(folder, tmp_path / "notes.txt")


def test_without_pillow(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    decoding.pillow.cache_clear()
    for needs in (lambda: ImageFiles(path, "train"), lambda: convert_images(folder, path)):
        with pytest.raises(UserError, match=r'need the library Pillow: pip install "hpcsgd\[images\]"'):
            needs()
    monkeypatch.undo()
    decoding.pillow.cache_clear()
    assert os.path.exists(path)
