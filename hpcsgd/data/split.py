"""The interface of data for training: one split of a dataset file, as samples of any kind."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import h5py
import numpy as np
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from hpcsgd.data.chunks import DamagedRowsError, read_rows
from hpcsgd.data.layout import Form, dataset, open_dataset_file
from hpcsgd.data.rng import Purpose, uniform
from hpcsgd.errors import UserError, count_text


class Drawn(list[int]):
    """Indices of samples that a sampler has drawn, with its seed and epoch.

    Some parts of samples, such as a patch of an image, are drawn at random in every epoch. The sample's
    index, `seed` and `epoch` alone determine them, so that they do not depend on the process that reads the
    sample.
    """

    def __init__(self, rows: Iterable[int], seed: int, epoch: int) -> None:
        super().__init__(rows)
        self.seed, self.epoch = seed, epoch

    def chance(self, count: int, row: int) -> list[float]:
        """Return `count` random numbers in [0, 1) for the sample with index `row`."""
        return uniform(count, self.seed, Purpose.PIECES, self.epoch, row).tolist()


_drawn: ContextVar[Drawn | None] = ContextVar("_drawn", default=None)
"""The indices that a `Wrapper` is reading, for the splits inside it."""


@dataclass(frozen=True)
class Batch:
    """Samples that were read together, as a sequence of pairs (x_i, y_i): rows i of `x` and `y`."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x, self.y, strict=True)


class LoaderProcessError(UserError):
    """A `UserError` of a loader process. Its message stays one line.

    Torch raises it again in the rank, made of a message that has the traceback of the loader process before
    the line.
    """

    def __init__(self, message: object = "", **about: Any) -> None:
        line = f"{message}"
        if line.startswith("Caught "):
            line = line.rpartition(f"\n{__name__}.{LoaderProcessError.__qualname__}: ")[2].rstrip()
        super().__init__(line, **about)


def collate(samples: Batch | Sequence[Any]) -> Any:
    """Return (x, y) of a `Batch` without a copy; collate other samples as PyTorch does by default."""
    return (samples.x, samples.y) if isinstance(samples, Batch) else default_collate(list(samples))


class Split(Dataset[tuple[Tensor, Tensor]], ABC):
    """The samples (x, y) of one split, in the order of the dataset file.

    All x of a split have the same shape, and so have all y. The exception is whole images for tests, which
    are read one at a time. Each process opens the file at its first read, so a split may be pickled and may
    cross forks. `DataLoader(split, ..., collate_fn=split.collate)` does no work per sample.
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
        """The label of each sample, for partitions; None if samples have none."""

    @abstractmethod
    def trial(self) -> Tensor:
        """Return the x of two extreme samples, as a batch. A model that accepts both accepts all samples."""

    @abstractmethod
    def _read(self, indices: Sequence[int]) -> Batch:
        """Return the samples at `indices`, all of which exist."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        batch = self.__getitems__([index])
        return batch.x[0], batch.y[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the samples at `indices`, read together. Raises `IndexError` for an index out of range."""
        count = len(self)
        outside = [index for index in indices if not 0 <= index < count]
        if outside:
            raise IndexError(
                f"{self.path}: split {self.split!r} has {count_text(count, 'sample')}, none at {outside}"
            )
        if (drawn := _drawn.get()) is not None and not isinstance(indices, Drawn):
            indices = Drawn(indices, drawn.seed, drawn.epoch)
        if get_worker_info() is None:
            return self._read(indices)
        try:
            return self._read(indices)
        except UserError as error:
            raise LoaderProcessError(str(error)) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    def _rows(self, rows: Sequence[int]) -> NDArray[np.uint8]:
        """Return the bytes of the given rows of the split's `x`: uint8 [len(rows), bytes].

        Raises `UserError` if one is damaged.
        """
        try:
            return read_rows(self._dataset(), rows)
        except DamagedRowsError as damage:
            named = ", ".join(map(str, damage.rows))
            text = f"rows {named} do not match their checksums"
            raise damaged(self.path, self.split, text) from damage

    def _dataset(self) -> h5py.Dataset:
        if self._opened is None or self._process != os.getpid():
            self._opened = dataset(open_dataset_file(self.path, self._form), f"{self.split}/x")
            self._process = os.getpid()
        return self._opened


class Wrapper(Dataset[Any]):
    """A user's dataset, such as torch's `Subset`, that may have splits inside.

    The dataset passes plain indices on to them. This class lets them know that a sampler has drawn these, so
    that they vary the samples.
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return the samples at `indices`, as a loader of torch reads them from the dataset."""
        before = _drawn.set(indices if isinstance(indices, Drawn) else None)
        try:
            read = getattr(self._data, "__getitems__", None)
            return [self._data[index] for index in indices] if read is None else read(indices)
        finally:
            _drawn.reset(before)


def require_labels(path: Path, split: str, labels: NDArray[Any], classes: int) -> None:
    """Raise `UserError` unless all labels are from 0 to `classes` − 1."""
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        wrong = labels[(labels < 0) | (labels >= classes)]
        text = f"label {wrong[0]}, and its {classes} classes are 0 to {classes - 1}"
        raise damaged(path, split, text)


def damaged(path: Path, split: str, what: str) -> UserError:
    """Return a `UserError` which says that the split is damaged, and `what` is wrong."""
    return UserError(f"{path}: split {split!r} is damaged: {what}; convert it again")


@runtime_checkable
class Varying(Protocol):
    """A split whose samples are changed at random, such as flipped, each time a batch has been read."""

    def vary(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """Return the samples to train on in place of the loaded x, y, with random numbers of `generator`."""
        ...


def varied(split: Split, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Return the samples to train on in place of the loaded x, y.

    They are varied if `split` has a random part (`Varying`), and unchanged otherwise.
    """
    return split.vary(x, y, generator) if isinstance(split, Varying) else (x, y)
