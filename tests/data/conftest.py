"""Small data sets in their original formats, and the real ones if this machine has them."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hpcsgd.data.formats import READERS, cifar
from hpcsgd.data.formats.cifar import Batch, Label, Layout

ROOT = Path(__file__).parents[2]
RECORDS = 7

SMALL = Layout(
    batches=(
        Batch("data_batch_1", "train", 0, RECORDS),
        Batch("data_batch_2", "train", RECORDS, RECORDS),
        Batch("test_batch", "test", 0, RECORDS),
    ),
    labels=(Label("coarse_labels", 3), Label("fine_labels", 10)),
    classes=tuple("abcdefghij"),
)


@pytest.fixture
def small_cifar(monkeypatch: pytest.MonkeyPatch) -> Layout:
    """Register and return the kind `small`, laid out like CIFAR-100, in three files of 7 records."""
    monkeypatch.setitem(READERS, "small", lambda source: cifar.read(SMALL, source))
    return SMALL


@pytest.fixture
def records() -> dict[str, NDArray[np.uint8]]:
    """Return the records of each file of `small`, as uint8 [7, 2 + 3072]."""
    generator = np.random.default_rng(0)
    found = {}
    for batch in SMALL.batches:
        found[batch.name] = generator.integers(0, 256, (batch.count, 2 + cifar.PIXELS), dtype=np.uint8)
        for column, label in enumerate(SMALL.labels):
            found[batch.name][:, column] %= label.classes
    return found


@pytest.fixture
def binary_folder(tmp_path: Path, records: dict[str, NDArray[np.uint8]]) -> Path:
    """Write the binary batches of `small`, and return their folder."""
    folder = tmp_path / "small-bin"
    folder.mkdir()
    for name, content in records.items():
        (folder / f"{name}.bin").write_bytes(content.tobytes())
    return folder


def idx(values: NDArray[np.uint8]) -> bytes:
    """Return `values` as the content of an idx file."""
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    """Write four gzipped idx files and return their folder.

    They have 23 training and 5 test images of 5 x 3 pixels, an odd number of bytes.
    """
    generator = np.random.default_rng(1)
    folder = tmp_path / "idx"
    folder.mkdir()
    for prefix, count in (("train", 23), ("t10k", 5)):
        images = generator.integers(0, 256, (count, 5, 3), dtype=np.uint8)
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        for name, values in ((f"{prefix}-images-idx3", images), (f"{prefix}-labels-idx1", labels)):
            (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(idx(values), mtime=0))
    return folder


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """Return a function that gives a folder of the real data by its name, or skips the test."""

    def find(name: str) -> Path:
        folder = Path(os.environ.get("HPCSGD_DATA", ROOT.parent / "shared" / "data")) / name
        if not folder.is_dir():
            pytest.skip(f"the real data is not here: no folder {folder} (set HPCSGD_DATA)")
        return folder

    return find
