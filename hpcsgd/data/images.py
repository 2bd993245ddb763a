"""Labelled images in blocks, on their way from a reader of an original format to a dataset file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcsgd.data.layout import Header

BLOCK_ROWS = 1000
"""The largest number of images in a block."""
STATISTICS_SPLIT = "train"
"""The split of which the mean and standard deviation are computed."""
LABELS_A_CHUNK = 1 << 16
"""Number of labels in a chunk of the HDF5 file."""


class Block(NamedTuple):
    """The images and labels for b rows of a split, from row `start` on.

    `images` is uint8 [b, C, H, W], and `labels` is uint8 [b].
    """

    split: str
    start: int
    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]


@dataclass(frozen=True)
class Images:
    """A labelled image collection that is read once, block by block, in any order.

    `shape` is (C, H, W). `scale` is the largest pixel value of the format. `rows` has the number of images of
    each split. `blocks` yields every row exactly once, or raises `UserError`.
    """

    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    scale: float
    rows: Mapping[str, int]
    blocks: Iterator[Block]

    def write(self, file: h5py.File, kind: str) -> Header:
        """Write all blocks to `file`, a new dataset file of the collection `kind`; return its header."""
        datasets = {split: _create(file, split, rows, self.shape) for split, rows in self.rows.items()}
        histogram = np.zeros((self.shape[0], 256), np.int64)
        written: Counter[str] = Counter()
        for block in self.blocks:
            x, y = datasets[block.split]
            rows = slice(block.start, block.start + len(block.labels))
            x[rows], y[rows] = block.images, block.labels
            written[block.split] += len(block.labels)
            if block.split == STATISTICS_SPLIT:
                histogram += _histogram(block)
        assert written == Counter(self.rows), f"the reader of {kind} gave {written}, announced {self.rows}"
        mean, std = mean_and_std(histogram, self.scale)
        header = Header(kind, self.classes, self.shape, self.scale, mean, std)
        header.write(file)
        return header


def in_blocks(
    split: str, start: int, images: NDArray[np.uint8], labels: NDArray[np.uint8]
) -> Iterator[Block]:
    """Cut `images` [n, C, H, W] and `labels` [n] into blocks of at most `BLOCK_ROWS` rows."""
    for first in range(0, len(images), BLOCK_ROWS):
        rows = slice(first, first + BLOCK_ROWS)
        yield Block(split, start + first, images[rows], labels[rows])


def _create(
    file: h5py.File, split: str, rows: int, shape: tuple[int, ...]
) -> tuple[h5py.Dataset, h5py.Dataset]:
    group = file.create_group(split)
    x = group.create_dataset("x", (rows, *shape), np.uint8, chunks=(1, *shape), fletcher32=True)
    y = group.create_dataset("y", (rows,), np.uint8, chunks=(min(rows, LABELS_A_CHUNK),), fletcher32=True)
    return x, y


def _histogram(block: Block) -> NDArray[np.int64]:
    """Return how often each pixel value occurs in each channel of the block's images: [C, 256]."""
    channels = range(block.images.shape[1])
    return np.stack([np.bincount(block.images[:, c].ravel(), minlength=256) for c in channels])


def mean_and_std(histogram: NDArray[np.int64], scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, of values divided by `scale`.

    `histogram` [C, 256] says how often each value occurs.
    """
    values = np.arange(256) / scale
    shares = histogram / histogram.sum(axis=1, keepdims=True)
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(axis=1))
    std[std == 0] = 1.0  # a constant channel becomes 0, without a division by zero
    return tuple(mean.tolist()), tuple(std.tolist())
