"""The samples of a dataset file of images, each of which is read when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcsgd.data.layout import Header, dataset, open_dataset_file
from hpcsgd.data.split import Batch, Split, damaged, require_labels
from hpcsgd.errors import UserError, near_miss


class ImageDataset(Split):
    """One split of a dataset file of images as normalized samples: x float32 [C, H, W], y an int64 scalar.

    A sample is (pixel / scale - mean) / std, with the values in `header`. A `Batch` of b has x float32 [b,
    C, H, W] and y int64 [b].

    Raises `UserError` if there is no such file or split, or the file has no images. Reading samples raises
    `UserError` if rows do not match their checksums.
    """

    def __init__(self, path: str | Path, split: str) -> None:
        super().__init__(path, split, "images")
        self.header, self._labels = _read_header(self.path, split)
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
        return self.header.shape

    @property
    def labels(self) -> NDArray[np.int64]:
        """The labels of all samples."""
        return self._labels.numpy()

    def __len__(self) -> int:
        return len(self._labels)

    def trial(self) -> Tensor:
        """Return the first and the last sample, normalized, as a batch [2, C, H, W] to test a model."""
        return self.__getitems__([0, len(self) - 1]).x

    def _read(self, indices: Sequence[int]) -> Batch:
        x = torch.from_numpy(self._rows(indices).astype(np.float32)).view(-1, *self.shape)
        return Batch(x.mul_(self._gain).sub_(self._shift), self._labels[list(indices)])


def _read_header(path: Path, split: str) -> tuple[Header, Tensor]:
    with open_dataset_file(path, "images") as file:
        try:
            if split not in file:
                raise UserError(f"{path}: no split {split!r}; {near_miss(split, file)}")
            header = Header.read(file)
            labels = torch.from_numpy(np.asarray(file[f"{split}/y"]).astype(np.int64))
            images = dataset(file, f"{split}/x")
        except (OSError, RuntimeError, KeyError) as error:
            raise damaged(path, split, f"header or labels cannot be read ({error})") from error
        if images.shape != (len(labels), *header.shape) or images.chunks != (1, *header.shape):
            raise damaged(path, split, f"images {images.shape}, labels {len(labels)}, header {header.shape}")
    require_labels(path, split, labels.numpy(), len(header.classes))
    return header, labels
