"""Samples of any shape with a class label each, from a user's own arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcsgd.data.layout import dataset, label, open_dataset_file
from hpcsgd.data.split import Batch, Split, damaged, require_labels
from hpcsgd.errors import UserError, count_text, near_miss

LABELS_A_CHUNK = 1 << 16
"""Number of labels in a chunk of the HDF5 file."""
LARGEST_BYTE = 255.0


class Part(NamedTuple):
    """The arrays of one split: samples `x`, uint8 or float32 [n, ...], and labels `y`, int64 [n]."""

    x: NDArray[np.uint8] | NDArray[np.float32]
    y: NDArray[np.int64]


@dataclass(frozen=True)
class Labelled:
    """The samples and labels of each split that are to be written to a dataset file, and the classes."""

    parts: Mapping[str, Part]
    classes: tuple[str, ...]

    @property
    def rows(self) -> Mapping[str, int]:
        """Number of samples of each split."""
        return {split: len(part.y) for split, part in self.parts.items()}

    def write(self, file: h5py.File, kind: str) -> Holds:
        """Write the arrays to `file`, a new dataset file of the collection `kind`; return its header."""
        label(file, "arrays", kind=kind, classes=self.classes)
        for split, (x, y) in self.parts.items():
            group = file.create_group(split)
            group.create_dataset("x", data=x, chunks=(1, *x.shape[1:]), fletcher32=True)
            group.create_dataset("y", data=y, chunks=(min(len(y), LABELS_A_CHUNK),), fletcher32=True)
        return Holds(kind, self.parts["train"].x.shape[1:], len(self.classes))


@dataclass(frozen=True)
class Holds:
    """The header of a dataset file of arrays: its collection, shape of samples and number of classes."""

    kind: str
    shape: tuple[int, ...]
    classes: int

    @property
    def holds(self) -> str:
        """A description of the file's content, for the output of `convert`."""
        return f"samples of shape {list(self.shape)}, {count_text(self.classes, 'class')}"


class Arrays(Split):
    """One split of a dataset file of arrays: x float32 [...], y an int64 scalar.

    Bytes (uint8) become x / 255; other numbers stay as they are. A `Batch` of b has x float32 [b, ...] and y
    int64 [b].

    Raises `UserError` if there is no such file or split, or the file has no arrays. Reading samples raises
    `UserError` if rows do not match their checksums.
    """

    def __init__(self, path: str | Path, split: str) -> None:
        super().__init__(path, split, "arrays")
        with open_dataset_file(self.path, "arrays") as file:
            if split not in file:
                raise UserError(f"{path}: no split {split!r}; {near_miss(split, file)}")
            try:
                attributes: dict[str, Any] = dict(file.attrs)
                self.classes: tuple[str, ...] = tuple(name.decode() for name in attributes["classes"])
                self._labels = np.asarray(file[f"{split}/y"]).astype(np.int64)
                x = dataset(file, f"{split}/x")
            except (OSError, RuntimeError, KeyError) as error:
                raise damaged(self.path, split, f"classes or labels cannot be read ({error})") from error
            if len(x) != len(self._labels) or x.chunks != (1, *x.shape[1:]):
                raise damaged(self.path, split, f"samples {x.shape}, labels {len(self._labels)}")
            require_labels(self.path, split, self._labels, len(self.classes))
            self.shape: tuple[int, ...] = x.shape[1:]
            self._dtype = x.dtype

    @property
    def labels(self) -> NDArray[np.int64]:
        """The labels of all samples."""
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def trial(self) -> Tensor:
        """Return the x of the first and the last sample, as a batch [2, ...] to test a model."""
        return self.__getitems__([0, len(self) - 1]).x

    def _read(self, indices: Sequence[int]) -> Batch:
        values = np.ascontiguousarray(self._rows(indices)).view(self._dtype).astype(np.float32)
        x = torch.from_numpy(values).view(-1, *self.shape)
        y = torch.from_numpy(self._labels[list(indices)])
        return Batch(x.div_(LARGEST_BYTE) if self._dtype == np.uint8 else x, y)
