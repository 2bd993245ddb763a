"""Ratings as samples for a recommender: an item that a user has rated, and items that are unrated.

The method is that of "Neural Collaborative Filtering" (https://arxiv.org/abs/1708.05031, sections 3.1.1 and
4.1). Items that the user has not rated are called negatives. The paper shuffles ratings and negatives
together. Here a sample is a rating with all of its negatives, so a batch of b samples has b · (1 + negatives)
pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from hpcsgd.data.interactions import Names
from hpcsgd.data.layout import dataset, open_dataset_file
from hpcsgd.data.split import Batch, Split, damaged
from hpcsgd.errors import UserError, near_miss


class Ratings(Split):
    """One split of a dataset file of ratings: x int64 [m, 2], pairs of user and item, and y float32 [m].

    y is 1 for the first pair, which the user has rated, and 0 for all others. In `train` m = 1, and `vary`
    adds `negatives` items that the user has not rated in `train`. They are drawn anew each time, each item
    with the same probability. So the item held out for tests may be among them, as in the paper. In `test`
    the other items are in the file. All ratings are held in memory.

    Raises `UserError` if there is no such file or split, or the file has no ratings or is damaged.
    """

    def __init__(self, path: str | Path, split: str, negatives: int = 4) -> None:
        super().__init__(path, split, "ratings")
        if negatives < 1:
            raise UserError(
                f"negatives = {negatives}: at least 1 is needed, or there is nothing to learn",
                key="negatives",
                value=negatives,
            )
        self.header, self._pairs, known = _read_all(self.path, split)
        self.negatives = negatives
        self._known = torch.from_numpy(np.sort(self._key(known)))

    @property
    def users(self) -> int:
        """Number of users."""
        return len(self.header.users)

    @property
    def items(self) -> int:
        """Number of items."""
        return len(self.header.items)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The user of each sample, so that partitions by label assign users to groups."""
        return self._pairs[:, 0].astype(np.int64)

    def __len__(self) -> int:
        return len(self._pairs)

    def trial(self) -> Tensor:
        """Return the pairs (first user, first item) and (last user, last item) as a batch to test a model."""
        return torch.tensor([[[0, 0]], [[self.users - 1, self.items - 1]]])

    def vary(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """Return samples of `train` with their negatives: x [b, 1 + negatives, 2], y [b, 1 + negatives]."""
        user = x[:, 0, 0].cpu()[:, None].expand(-1, self.negatives)
        item = self._drawn(user.shape, generator)
        while (wrong := self._rated(user, item)).any():
            item[wrong] = self._drawn(item[wrong].shape, generator)
        pairs = torch.stack([user, item], dim=-1).to(x.device)
        return torch.cat([x, pairs], dim=1), torch.cat([y, y.new_zeros(item.shape)], dim=1)

    def _drawn(self, shape: Sequence[int], generator: Generator) -> Tensor:
        return torch.randint(self.items, tuple(shape), generator=generator, device=generator.device).cpu()

    def _rated(self, user: Tensor, item: Tensor) -> Tensor:
        key = user * self.items + item
        at = torch.searchsorted(self._known, key).clamp(max=len(self._known) - 1)
        return self._known[at] == key

    def _key(self, pairs: NDArray[np.int32]) -> NDArray[np.int64]:
        return pairs[:, 0].astype(np.int64) * self.items + pairs[:, 1]

    def _read(self, indices: Sequence[int]) -> Batch:
        rows = torch.from_numpy(self._pairs[list(indices)].astype(np.int64))
        items = rows[:, 1:]
        x = torch.stack([rows[:, :1].expand_as(items), items], dim=-1)
        y = torch.zeros(items.shape)
        y[:, 0] = 1
        return Batch(x, y)


def _read_all(path: Path, split: str) -> tuple[Names, NDArray[np.int32], NDArray[np.int32]]:
    """Return the header of the dataset file at `path`, the rows of the split, and the rows of `train`."""
    with open_dataset_file(path, "ratings") as file:
        splits = [name for name in ("train", "test") if name in file]
        if split not in splits:
            raise UserError(f"{path}: no split {split!r}; {near_miss(split, splits)}")
        try:
            names = Names.read(file)
            rows, known = (dataset(file, f"{name}/x")[:].astype(np.int32) for name in (split, "train"))
        except (OSError, RuntimeError, KeyError) as error:
            raise damaged(path, split, f"ratings cannot be read ({error})") from error
    for name, found in ((split, rows), ("train", known)):
        if found.ndim != 2 or found.shape[1] < 2 or not len(found):
            raise damaged(path, name, f"ratings {found.shape}")
    return names, rows, known
