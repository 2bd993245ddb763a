"""Make a store from an image collection as it was downloaded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcsgd.data.formats import READERS
from hpcsgd.data.hdf5 import new_file
from hpcsgd.data.images import Block, Images
from hpcsgd.data.layout import Header
from hpcsgd.errors import UserError, near_miss

STATISTICS_SPLIT = "train"
LABELS_A_CHUNK = 1 << 16


@dataclass(frozen=True)
class Summary:
    """What was written: where, the header of the store, images per split, bytes of the file."""

    path: Path
    header: Header
    rows: dict[str, int]
    bytes: int

    def __str__(self) -> str:
        splits = ", ".join(f"{count} {split}" for split, count in self.rows.items())
        size = " x ".join(map(str, self.header.shape))
        classes = len(self.header.classes)
        return (
            f"{self.path}: {self.header.kind}, {splits}, {size}, {classes} classes, {self.bytes / 1e6:.1f} MB"
        )


def convert(kind: str, source: Path | None, target: Path) -> Summary:
    """Write the collection `kind` (a key of `READERS`), read from `source`, as a store at `target`.

    An existing `target` is replaced once the new store is complete, and left as it is if anything fails.
    `digits` needs no source. Raises `UserError` for an unknown kind, for a source that is missing, damaged or
    truncated (with file and byte), and for a target that cannot be written.
    """
    if kind not in READERS:
        raise UserError(f"no data kind {kind!r}; {near_miss(kind, READERS)}")
    if target.is_dir():
        raise UserError(f"{target}: is a folder, a file name is needed")
    if not target.parent.is_dir():
        raise UserError(f"{target}: there is no folder {target.parent}")
    images = READERS[kind](source)
    try:
        with new_file(target) as file:
            header = _write(file, kind, images)
        return Summary(target, header, dict(images.rows), target.stat().st_size)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error})") from error


def _write(file: h5py.File, kind: str, images: Images) -> Header:
    datasets = {split: _create(file, split, rows, images.shape) for split, rows in images.rows.items()}
    histogram = np.zeros((images.shape[0], 256), np.int64)
    written: Counter[str] = Counter()
    for block in images.blocks:
        x, y = datasets[block.split]
        rows = slice(block.start, block.start + len(block.labels))
        x[rows], y[rows] = block.images, block.labels
        written[block.split] += len(block.labels)
        if block.split == STATISTICS_SPLIT:
            histogram += _histogram(block)
    assert written == Counter(images.rows), f"the reader of {kind} gave {written}, announced {images.rows}"
    mean, std = _mean_and_std(histogram, images.scale)
    header = Header(kind, images.classes, images.shape, images.scale, mean, std)
    header.write(file)
    return header


def _create(
    file: h5py.File, split: str, rows: int, shape: tuple[int, ...]
) -> tuple[h5py.Dataset, h5py.Dataset]:
    group = file.create_group(split)
    x = group.create_dataset("x", (rows, *shape), np.uint8, chunks=(1, *shape), fletcher32=True)
    y = group.create_dataset("y", (rows,), np.uint8, chunks=(min(rows, LABELS_A_CHUNK),), fletcher32=True)
    return x, y


def _histogram(block: Block) -> NDArray[np.int64]:
    """How often each pixel value occurs in each channel: [C, 256]."""
    channels = range(block.images.shape[1])
    return np.stack([np.bincount(block.images[:, c].ravel(), minlength=256) for c in channels])


def _mean_and_std(histogram: NDArray[np.int64], scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    values = np.arange(256) / scale
    shares = histogram / histogram.sum(axis=1, keepdims=True)
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(axis=1))
    std[std == 0] = 1.0  # a constant channel becomes 0, not a division by zero
    return tuple(mean.tolist()), tuple(std.tolist())
