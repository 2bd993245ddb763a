"""Read the samples of a store, only those asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from hpcsgd.data.chunks import DamagedRowsError, read_rows
from hpcsgd.data.layout import Header, open_store
from hpcsgd.errors import UserError, near_miss


@dataclass(frozen=True)
class Batch:
    """Samples that were read together: `x` float32 [b, C, H, W], `y` int64 [b]; a sequence of (x_i, y_i)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x, self.y, strict=True)


def collate(samples: Batch | Sequence[Any]) -> Any:
    """For a `DataLoader`: the (x, y) of a `Batch` as they are; other samples as PyTorch does it."""
    return (samples.x, samples.y) if isinstance(samples, Batch) else default_collate(list(samples))


class Store(Dataset[tuple[Tensor, Tensor]]):
    """One split of a store as normalized samples: x float32 [C, H, W], y an int64 scalar.

    A sample is (pixel / scale - mean) / std, with the values in `header`. The file is opened at the first
    read in each process, so a store may be pickled and may cross forks. `DataLoader(store, ...,
    collate_fn=store.collate)` does no work per sample.

    Raises `UserError` if there is no such file or split or the file is not a store and, when reading, if rows
    do not match their checksums.
    """

    collate = staticmethod(collate)

    def __init__(self, path: str | Path, split: str) -> None:
        self.path = Path(path)
        self.split = split
        self.header, self._labels = _read_header(self.path, split)
        self._opened: h5py.Dataset | None = None
        self._process = 0
        std = torch.tensor(self.header.std).view(-1, 1, 1)
        self._gain = 1 / (self.header.scale * std)
        self._shift = torch.tensor(self.header.mean).view(-1, 1, 1) / std

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the labels 0, 1, ..."""
        return self.header.classes

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a sample."""
        return self.header.shape

    @property
    def labels(self) -> NDArray[np.int64]:
        """Those of all samples."""
        return self._labels.numpy()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        batch = self.__getitems__([index])
        return batch.x[0], batch.y[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The samples at `indices`, read and normalized together; raises `IndexError` outside [0, len)."""
        count = len(self)
        outside = [index for index in indices if not 0 <= index < count]
        if outside:
            raise IndexError(f"{self.path}: split {self.split!r} has {count} samples, none at {outside}")
        try:
            pixels = read_rows(self._images(), indices)
        except DamagedRowsError as damage:
            rows = ", ".join(map(str, damage.rows))
            raise _damaged(self.path, self.split, f"rows {rows} do not match their checksums") from damage
        x = torch.from_numpy(pixels.astype(np.float32)).view(-1, *self.shape)
        return Batch(x.mul_(self._gain).sub_(self._shift), self._labels[list(indices)])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    def _images(self) -> h5py.Dataset:
        if self._opened is None or self._process != os.getpid():
            self._opened = _dataset(open_store(self.path), f"{self.split}/x")
            self._process = os.getpid()
        return self._opened


def _read_header(path: Path, split: str) -> tuple[Header, Tensor]:
    with open_store(path) as file:
        try:
            if split not in file:
                raise UserError(f"{path}: no split {split!r}; {near_miss(split, file)}")
            header = Header.read(file)
            labels = torch.from_numpy(np.asarray(file[f"{split}/y"]).astype(np.int64))
            images = _dataset(file, f"{split}/x")
        except (OSError, RuntimeError, KeyError) as error:
            raise _damaged(path, split, f"header or labels cannot be read ({error})") from error
        if images.shape != (len(labels), *header.shape) or images.chunks != (1, *header.shape):
            raise _damaged(path, split, f"images {images.shape}, labels {len(labels)}, header {header.shape}")
    return header, labels


def _dataset(file: h5py.File, name: str) -> h5py.Dataset:
    found = file[name]
    assert isinstance(found, h5py.Dataset)
    return found


def _damaged(path: Path, split: str, what: str) -> UserError:
    return UserError(f"{path}: split {split!r} is damaged: {what}; convert it again")
