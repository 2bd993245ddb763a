"""One split of a store as samples, whatever it holds: what training asks of its data."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import h5py
import numpy as np
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.utils.data import Dataset, default_collate

from hpcsgd.data.chunks import DamagedRowsError, read_rows
from hpcsgd.data.layout import Form, dataset, open_store
from hpcsgd.data.rng import Purpose, uniform
from hpcsgd.errors import UserError, count_text


class Drawn(list[int]):
    """Samples that a sampler has drawn. What is drawn anew of each of them in every epoch, such as a piece of
    an image, follows from its place, `seed` and `epoch`, whoever reads it and where."""

    def __init__(self, rows: Iterable[int], seed: int, epoch: int) -> None:
        super().__init__(rows)
        self.seed, self.epoch = seed, epoch

    def chance(self, count: int, row: int) -> list[float]:
        """So many numbers in [0, 1) for the sample `row`."""
        return uniform(count, self.seed, Purpose.PIECES, self.epoch, row).tolist()


@dataclass(frozen=True)
class Batch:
    """Samples that were read together, a row each of `x` and of `y`; a sequence of (x_i, y_i)."""

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


class Split(Dataset[tuple[Tensor, Tensor]], ABC):
    """Samples (x, y) in the order of the store; x and y have the same shape in all of a split, but for whole
    images to test on, which are read one at a time.

    The file is opened at the first read in each process, so a split may be pickled and may cross forks.
    `DataLoader(split, ..., collate_fn=split.collate)` does no work per sample.
    """

    collate = staticmethod(collate)

    def __init__(self, path: str | Path, split: str, form: Form) -> None:
        self.path = Path(path)
        self.split = split
        self._form: Form = form
        self._opened: h5py.Dataset | None = None
        self._process = 0

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def labels(self) -> NDArray[np.int64] | None:
        """What partitions go by, one of each sample; None where samples have none."""

    @abstractmethod
    def trial(self) -> Tensor:
        """The x of two samples such that a model that takes these takes all."""

    @abstractmethod
    def _read(self, indices: Sequence[int]) -> Batch:
        """The samples at `indices`, all of which there are."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        batch = self.__getitems__([index])
        return batch.x[0], batch.y[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The samples at `indices`, read together; raises `IndexError` outside [0, len)."""
        count = len(self)
        outside = [index for index in indices if not 0 <= index < count]
        if outside:
            raise IndexError(
                f"{self.path}: split {self.split!r} has {count_text(count, 'sample')}, none at {outside}"
            )
        return self._read(indices)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    def _rows(self, rows: Sequence[int]) -> NDArray[np.uint8]:
        """The bytes of these rows of the split's `x`; raises `UserError` where they are damaged."""
        try:
            return read_rows(self._dataset(), rows)
        except DamagedRowsError as damage:
            named = ", ".join(map(str, damage.rows))
            text = f"rows {named} do not match their checksums"
            raise damaged(self.path, self.split, text) from damage

    def _dataset(self) -> h5py.Dataset:
        if self._opened is None or self._process != os.getpid():
            self._opened = dataset(open_store(self.path, self._form), f"{self.split}/x")
            self._process = os.getpid()
        return self._opened


def require_labels(path: Path, split: str, labels: NDArray[Any], classes: int) -> None:
    """Raise `UserError` where one of the labels is of no class."""
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        wrong = labels[(labels < 0) | (labels >= classes)]
        text = f"label {wrong[0]}, and its {classes} classes are 0 to {classes - 1}"
        raise damaged(path, split, text)


def damaged(path: Path, split: str, what: str) -> UserError:
    """A `UserError` that says so."""
    return UserError(f"{path}: split {split!r} is damaged: {what}; convert it again")


@runtime_checkable
class Varying(Protocol):
    """A split in whose samples something is drawn anew each time, other than while they are read."""

    def vary(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """What to train on in place of the loaded samples x, y: what is drawn is drawn from `generator`."""
        ...


def varied(split: Split, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """What to train on in place of the loaded samples x, y of `split`: these, where nothing is drawn."""
    return split.vary(x, y, generator) if isinstance(split, Varying) else (x, y)
