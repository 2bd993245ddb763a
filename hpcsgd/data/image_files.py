"""Images of any size as samples, decoded when read: a random crop for training, the centre for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcsgd.data.decoding import DRAWS, decoded, middle, pillow, varied
from hpcsgd.data.image_folder import ImageFolder
from hpcsgd.data.image_shards import Reader, Written, folder_of
from hpcsgd.data.images import STATISTICS_SPLIT, mean_and_std
from hpcsgd.data.layout import Header, open_dataset_file
from hpcsgd.data.split import Batch, Drawn, Split, damaged, require_labels
from hpcsgd.errors import UserError, located, near_miss

SCALE = 255.0
LARGEST = 1 << 14
"""Largest side of a sample, in pixels."""
INDEX = ("y", "shard", "begin", "length", "crc32")
"""The columns of the index of images; see `hpcsgd.data.layout`."""
ROWS_A_CHUNK = 1 << 16
"""Number of rows in a chunk of the HDF5 file."""


@dataclass(frozen=True)
class Collected:
    """A folder of images whose shards are written, ready to be indexed in a dataset file.

    Samples will have `size` x `size` pixels.
    """

    source: ImageFolder
    shards: Mapping[str, Sequence[Written]]
    size: int

    @property
    def rows(self) -> Mapping[str, int]:
        """Number of images of each split."""
        return {split: len(files) for split, files in self.source.files.items()}

    def write(self, file: h5py.File, kind: str) -> Header:
        """Write an index of the shards to `file`, a new dataset file, and return its header."""
        for split, files in self.source.files.items():
            _write_index(file.create_group(split), np.array([f.label for f in files]), self.shards[split])
        counts = np.sum([shard.histogram for shard in self.shards[STATISTICS_SPLIT]], axis=0)
        shape = (3, self.size, self.size)
        header = Header(kind, self.source.classes, shape, SCALE, *mean_and_std(counts, SCALE))
        header.write(file, "image files")
        return header


class ImageFiles(Split):
    """One split of a dataset file of image files: normalized x float32 [3, size, size], and y int64.

    Samples drawn by a sampler are varied: a random crop of at least the fraction `smallest` of the image's
    area, of a shape between 3 : 4 and 4 : 3, resized, and mirrored half of the times. The crop is the same
    for the same seed, epoch and image, on any number of ranks and processes. Other samples are the centre of
    the image. `size` is by default that of the conversion.

    Raises `UserError` if there is no such file or split, or the file has no image files. Reading samples
    raises `UserError` if the file is damaged.
    """

    def __init__(self, path: str | Path, split: str, size: int | None = None, smallest: float = 0.08) -> None:
        super().__init__(path, split, "image files")
        pillow()
        if size is not None:
            require_size(size)
        if not 0 < smallest <= 1:
            raise UserError(
                f"smallest = {smallest}: must be more than 0 and at most 1", key="smallest", value=smallest
            )
        self.header, self._index, shards = _read_index(self.path, split)
        self.size, self.smallest = size or self.header.shape[1], smallest
        self._shards = Reader(folder_of(self.path), shards)
        self._shards.require_all()
        std = torch.tensor(self.header.std).view(-1, 1, 1)
        self._gain = 1 / (self.header.scale * std)
        self._shift = torch.tensor(self.header.mean).view(-1, 1, 1) / std

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names of the labels 0, 1 and so on."""
        return self.header.classes

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a sample."""
        return 3, self.size, self.size

    @property
    def labels(self) -> NDArray[np.int64]:
        """The labels of all samples."""
        return self._index["y"]

    def __len__(self) -> int:
        return len(self.labels)

    def trial(self) -> Tensor:
        """Return the inputs of the first and the last sample, to find damaged files before a training."""
        return self.__getitems__([0, len(self) - 1]).x

    def _read(self, indices: Sequence[int]) -> Batch:
        pixels = np.stack([self._sample(row, indices) for row in indices])
        x = torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))).float()
        y = torch.from_numpy(self.labels[list(indices)])
        return Batch(x.mul_(self._gain).sub_(self._shift), y)

    def _sample(self, row: int, among: Sequence[int]) -> NDArray[np.uint8]:
        shard, begin, length, crc32 = (int(self._index[name][row]) for name in INDEX[1:])
        with located(f"{self.path}: split {self.split!r}, image {row}"):
            image = decoded(self._shards.read(shard, begin, length, crc32))
        if isinstance(among, Drawn):
            return varied(image, self.size, self.smallest, among.chance(DRAWS, row))
        return middle(image, self.size)


def _write_index(group: h5py.Group, labels: NDArray[np.int64], shards: Sequence[Written]) -> None:
    lengths = [shard.length.astype(np.uint64) for shard in shards]
    columns = {
        "y": labels.astype("<u4"),
        "shard": np.repeat(np.arange(len(shards)), [len(each) for each in lengths]).astype("<u4"),
        "begin": np.concatenate([np.cumsum(each) - each for each in lengths]).astype("<u8"),
        "length": np.concatenate(lengths).astype("<u4"),
        "crc32": np.concatenate([shard.crc32 for shard in shards]).astype("<u4"),
        "shards": np.char.encode([shard.name for shard in shards], "utf-8"),
    }
    for name, values in columns.items():
        chunks = (min(len(values), ROWS_A_CHUNK),)
        group.create_dataset(name, data=values, chunks=chunks, fletcher32=True)


def require_size(size: int) -> None:
    """Raise `UserError` unless samples can have `size` x `size` pixels: `size` from 1 to `LARGEST`."""
    if not 1 <= size <= LARGEST:
        raise UserError(f"size = {size}: a sample has 1 to {LARGEST} pixels a side", key="size", value=size)


def _read_index(path: Path, split: str) -> tuple[Header, Mapping[str, NDArray[np.int64]], list[str]]:
    """Return the header of the dataset file at `path`, and the split's index and names of shards."""
    with open_dataset_file(path, "image files") as file:
        splits = [name for name in ("train", "test") if name in file]
        if split not in splits:
            raise UserError(f"{path}: no split {split!r}; {near_miss(split, splits)}")
        try:
            header = Header.read(file)
            index = {name: np.asarray(file[f"{split}/{name}"]).astype(np.int64) for name in INDEX}
            found: Any = np.asarray(file[f"{split}/shards"])
            shards = [name.decode() for name in found.tolist()]
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise damaged(path, split, f"header or index cannot be read ({error})") from error
    if len({len(column) for column in index.values()}) != 1 or not len(index["y"]):
        raise damaged(path, split, "the columns of its index are of unlike lengths")
    require_labels(path, split, index["y"], len(header.classes))
    return header, index, shards
