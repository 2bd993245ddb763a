from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset

from hpcsgd.data import ImageDataset, collate, convert
from hpcsgd.errors import UserError


@pytest.fixture
def path(tmp_path: Path, idx_folder: Path) -> Path:
    convert("mnist", idx_folder, tmp_path / "store.h5")
    return tmp_path / "store.h5"


def samples(path: Path, split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    """Return all samples of a split, read by h5py alone."""
    with h5py.File(path, locking=False) as file:
        pixels, labels = np.asarray(file[f"{split}/x"]), np.asarray(file[f"{split}/y"])
        train = np.asarray(file["train/x"]) / 255
    x = (pixels / 255 - train.mean()) / train.std()
    return torch.from_numpy(x).float(), torch.from_numpy(labels).long()


def test_samples_are_normalized(path: Path) -> None:
    store = ImageDataset(path, "train")
    x, y = samples(path)
    assert len(store) == 23
    assert store.shape == (1, 5, 3)
    assert store.classes == tuple("0123456789")
    assert store.header.kind == "mnist"
    rows = [22, 0, 7, 7]
    batch = store.__getitems__(rows)
    torch.testing.assert_close(batch.x, x[rows])
    assert torch.equal(batch.y, y[rows])
    torch.testing.assert_close(store[3][0], x[3])
    assert store[3][1] == y[3]
    assert [label for _, label in store] == y.tolist()
    torch.testing.assert_close(ImageDataset(path, "test")[4][0], samples(path, "test")[0][4])


@pytest.mark.parametrize("index", [23, -1, 1000])
def test_an_index_outside(path: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"23 samples, none at .{index}"):
        ImageDataset(path, "train").__getitems__([0, index])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [ImageDataset.collate, None], ids=["collate", "default"])
def test_through_a_loader(path: Path, workers: int, collate_fn: object) -> None:
    store = ImageDataset(path, "train")
    store[0]  # open the file here as well, before the loader processes are forked
    loader = DataLoader(store, 5, num_workers=workers, collate_fn=collate_fn)  # pyright: ignore[reportArgumentType]
    batches = list(loader)
    x, y = samples(path)
    assert [len(labels) for _, labels in batches] == [5, 5, 5, 5, 3]
    torch.testing.assert_close(torch.cat([images for images, _ in batches]), x)
    assert torch.equal(torch.cat([labels for _, labels in batches]), y)
    assert batches[0][0].dtype == torch.float32
    assert batches[0][1].dtype == torch.int64


def test_a_part_through_a_loader(path: Path) -> None:
    part = Subset(ImageDataset(path, "train"), [3, 1, 2])
    ((x, y),) = DataLoader(part, 3, collate_fn=ImageDataset.collate)
    torch.testing.assert_close(x, samples(path)[0][[3, 1, 2]])
    assert torch.equal(y, samples(path)[1][[3, 1, 2]])


def test_collate_takes_other_samples(path: Path) -> None:
    store = ImageDataset(path, "train")
    x, y = collate([store[0], store[1]])
    torch.testing.assert_close(x, samples(path)[0][:2])
    assert torch.equal(y, samples(path)[1][:2])


def test_pickled_while_open(path: Path) -> None:
    store = ImageDataset(path, "train")
    store[0]
    copy = pickle.loads(pickle.dumps(store))
    assert torch.equal(copy[5][0], store[5][0])


def test_across_a_fork_the_file_is_opened_anew(path: Path) -> None:
    store = ImageDataset(path, "train")
    store[0]
    parent = store._opened

    def child(queue: multiprocessing.SimpleQueue[tuple[bool, list[float]]]) -> None:
        values = store[5][0].flatten().tolist()
        queue.put((store._opened is not parent, values))
        os._exit(0)

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    anew, values = queue.get()
    process.join()
    assert anew
    assert values == store[5][0].flatten().tolist()


def test_from_several_threads(path: Path) -> None:
    store = ImageDataset(path, "train")
    x, _ = samples(path)
    differing: list[int] = []

    def read(rank: int) -> None:
        for i in range(50):
            rows = [(rank * 5 + i) % 23, i % 23]
            if not torch.allclose(store.__getitems__(rows).x, x[rows], atol=1e-6):
                differing.append(i)

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not differing


def test_what_is_not_a_store(tmp_path: Path, path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.h5: no such file; .hpcsgd data convert"):
        ImageDataset(tmp_path / "nowhere.h5", "train")
    with pytest.raises(UserError, match=r"not a dataset file, or damaged .*File name too long"):
        ImageDataset(tmp_path / ("a" * 5000), "train")
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(UserError, match=r"text\.h5: not a dataset file"):
        ImageDataset(tmp_path / "text.h5", "train")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 1
    with pytest.raises(UserError, match=r"other\.h5: an HDF5 file, but not a dataset file"):
        ImageDataset(tmp_path / "other.h5", "train")
    with pytest.raises(UserError, match="no split 'trains'; did you mean 'train'"):
        ImageDataset(path, "trains")
    with h5py.File(path, "a") as file:
        file.attrs["version"] = 2
    with pytest.raises(UserError, match="a dataset file of images of version 2, only 1 is read"):
        ImageDataset(path, "train")


def test_a_damaged_row_is_named(path: Path) -> None:
    with h5py.File(path, locking=False) as file:
        images = file["train/x"]
        assert isinstance(images, h5py.Dataset)
        places = {row: images.id.get_chunk_info_by_coord((row, 0, 0, 0)).byte_offset for row in (4, 9)}
    content = bytearray(path.read_bytes())
    for place in places.values():
        content[place + 2] ^= 1
    path.write_bytes(content)
    store = ImageDataset(path, "train")
    store.__getitems__([row for row in range(23) if row not in places])
    with pytest.raises(UserError, match=r"split 'train' is damaged: rows 9, 4 do not match") as caught:
        store.__getitems__([9, 0, 4])
    assert str(path) in str(caught.value)


def test_a_row_never_written_is_damaged(path: Path) -> None:
    with h5py.File(path, "a") as file:
        shape = (2, 1, 5, 3)
        del file["test/x"], file["test/y"]
        file.create_dataset("test/x", shape, np.uint8, chunks=(1, *shape[1:]), fletcher32=True)
        file["test/y"] = np.zeros(2, np.uint8)
    with pytest.raises(UserError, match="rows 1 do not match"):
        ImageDataset(path, "test")[1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_right(path: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    damaged = tmp_path / f"damaged{data.draw(st.integers(0, 10**9))}.h5"
    damaged.write_bytes(content)
    whole = ImageDataset(path, "train")
    try:
        store = ImageDataset(damaged, "train")
        batch = store.__getitems__(range(len(store)))
    except UserError as refusal:
        message = str(refusal)
    else:
        message = str(damaged)
        assert store.header == whole.header
        assert torch.equal(batch.x, whole.__getitems__(range(23)).x)
        assert torch.equal(batch.y, whole.__getitems__(range(23)).y)
    damaged.unlink()
    assert str(damaged) in message


def test_labels_of_no_class(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["test/y"][3] = 77
    told = r"split 'test' is damaged: label 77, and its 10 classes are 0 to 9; convert it again$"
    with pytest.raises(UserError, match=told):
        ImageDataset(path, "test")
    ImageDataset(path, "train")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "store.h5")
    with pytest.raises(UserError, match=r"store.h5: a pipe, and not a file$"):
        ImageDataset(tmp_path / "store.h5", "train")
