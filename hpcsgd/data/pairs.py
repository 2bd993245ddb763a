"""Images with reduced copies as samples for super-resolution: patches for training, whole for tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcsgd.data.layout import open_dataset_file
from hpcsgd.data.reductions import Reduced
from hpcsgd.data.split import Batch, Drawn, Split, damaged
from hpcsgd.errors import UserError, near_miss

SCALE = 255.0
Place = tuple[int, int]
"""The first row and column of a patch in the reduced image."""


class Pairs(Split):
    """One split of a dataset file of pairs, with values from 0 to 1.

    x is float32 [3, h, w], and y float32 [3, s·h, s·w] is the image from which x was reduced.

    In `train` samples are patches, h = w = `patch`, with `patches` of each image in an epoch, as in
    "Enhanced Deep Residual Networks for Single Image Super-Resolution" (https://arxiv.org/abs/1707.02921,
    section 4.2). Samples drawn by a sampler have random positions, and are rotated and mirrored in one of
    eight ways. They are the same for the same seed, epoch and index, on any number of ranks and processes.
    Other samples are the centre of their image. In `test` samples are whole images; if their sizes differ,
    they must be read one at a time.

    Raises `UserError` if there is no such file or split, the file has no pairs, or a training image is
    smaller than a patch. Reading samples raises `UserError` if the file is damaged.
    """

    def __init__(self, path: str | Path, split: str, patch: int = 48, patches: int = 1) -> None:
        super().__init__(path, split, "pairs")
        for name, value in (("patch", patch), ("patches", patches)):
            if value < 1:
                raise UserError(f"{name} = {value}: must be at least 1", key=name, value=value)
        self.header, self._images = _read_header(self.path, split)
        if patch > self.header.least:
            raise UserError(
                f"patch = {patch}: the smallest reduced image in {self.path} has {self.header.least} pixels "
                "on a side",
                key="patch",
                value=patch,
            )
        self.patch, self.patches = patch, patches if split == "train" else 1
        self._file: h5py.File | None = None
        self._reader = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_file": None}

    @property
    def scale(self) -> int:
        """The factor s by which the sides of y are longer than those of x."""
        return self.header.scale

    @property
    def labels(self) -> None:
        """Pairs have no labels."""
        return None

    def __len__(self) -> int:
        return self._images * self.patches

    def trial(self) -> Tensor:
        """Return the x of two grey patches, as a batch to test a model."""
        return torch.full((2, 3, self.patch, self.patch), 0.5)

    def _read(self, indices: Sequence[int]) -> Batch:
        found = [self._sample(row, indices) for row in indices]
        x, y = zip(*found, strict=True)
        if len({low.shape for low in x}) > 1:
            sizes = " and ".join(f"{low.shape[1]} x {low.shape[0]}" for low in x[:2])
            raise UserError(f"{self.path}: images {sizes} cannot be in one batch: read them one at a time")
        return Batch(_tensor(x), _tensor(y))

    def _sample(self, row: int, among: Sequence[int]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the reduced and the original image of sample `row`, uint8 [h, w, 3] and [s·h, s·w, 3].

        If `among`, the samples that are read together, were drawn by a sampler, the patch is random.
        """
        image = row // self.patches
        try:
            low, high = (self._opened_file()[f"{self.split}/{image}/{name}"] for name in ("low", "high"))
            if self.split != "train":
                return low[:], high[:]
            return self._patch(low, high, among.chance(3, row) if isinstance(among, Drawn) else None)
        except (OSError, RuntimeError, KeyError) as error:
            raise damaged(self.path, self.split, f"image {image} cannot be read ({error})") from error

    def _patch(
        self, low: Any, high: Any, chance: Sequence[float] | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        p, s = self.patch, self.scale
        down, across, way = chance or (0.5, 0.5, 0.0)
        top, left = (int(part * (n - p + 1)) for part, n in zip((down, across), low.shape[:2], strict=True))
        small = low[top : top + p, left : left + p]
        large = high[s * top : s * (top + p), s * left : s * (left + p)]
        return turned(small, int(8 * way)), turned(large, int(8 * way))

    def _opened_file(self) -> Any:
        if self._file is None or self._reader != os.getpid():
            self._file, self._reader = open_dataset_file(self.path, "pairs"), os.getpid()
        return self._file


def turned(x: NDArray[np.uint8], way: int) -> NDArray[np.uint8]:
    """Return the image x [h, w, 3] turned in way number `way` of eight.

    It is rotated by 0 to 3 right angles, and mirrored if `way` ≥ 4.
    """
    quarters, mirrored = way % 4, way >= 4
    found = np.rot90(x, quarters)
    return found[:, ::-1] if mirrored else found


def _tensor(images: Sequence[NDArray[np.uint8]]) -> Tensor:
    stacked = np.stack(images).transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(stacked)).float().div_(SCALE)


def _read_header(path: Path, split: str) -> tuple[Reduced, int]:
    """Return the header of the dataset file at `path`, and the number of images of the split."""
    with open_dataset_file(path, "pairs") as file:
        splits = [name for name in ("train", "test") if name in file]
        if split not in splits:
            raise UserError(f"{path}: no split {split!r}; {near_miss(split, splits)}")
        try:
            attributes: dict[str, Any] = dict(file[split].attrs)
            return Reduced.read(file), int(attributes["count"])
        except (OSError, RuntimeError, KeyError) as error:
            raise damaged(path, split, f"header cannot be read ({error})") from error
