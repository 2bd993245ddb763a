"""Ratings of items by users that are to be written to a dataset file; some are held out for tests.

The protocol is that of "Neural Collaborative Filtering" (https://arxiv.org/abs/1708.05031, section 4.1).
Ratings count as signs of interest, whatever their value. The latest rating of each user is held out (leave
one out). A model has to find it among 99 items that the user has not rated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcsgd.data.layout import label
from hpcsgd.data.rng import distinct
from hpcsgd.errors import UserError, located

OTHERS = 99
"""Number of items in a test sample that the user has not rated.

They are drawn at the conversion, so that all runs have the same ones.
"""
ROWS_A_CHUNK = 1 << 12
"""Number of rows in a chunk of the HDF5 file."""


@dataclass(frozen=True)
class Names:
    """The header of a dataset file of ratings: the collection's name, and users and items.

    User i of the file has the number `users[i]` in the original data, and item i has the number `items[i]`
    (int64).
    """

    kind: str
    users: NDArray[np.int64]
    items: NDArray[np.int64]

    @property
    def holds(self) -> str:
        """A description of the file's content, for the output of `convert`."""
        return f"{len(self.users)} users, {len(self.items)} items"

    def write(self, file: h5py.File) -> None:
        label(file, "ratings", kind=self.kind)
        for name, values in (("users", self.users), ("items", self.items)):
            _write(file, name, values)

    @staticmethod
    def read(file: h5py.File) -> Names:
        """Read the header of `file`.

        Raises `KeyError` if a part of the header is missing, and `OSError` if one is damaged.
        """
        kind = str(file.attrs["kind"].decode())  # pyright: ignore[reportAttributeAccessIssue]
        return Names(kind, np.asarray(file["users"]), np.asarray(file["items"]))


@dataclass(frozen=True)
class Interactions:
    """Ratings that were read: user `users[i]` rated item `items[i]` at `times[i]`; int64 [n].

    Users and items are numbered as by the data's authors. No user has rated an item twice. `source` is the
    file the ratings come from.
    """

    source: str
    users: NDArray[np.int64]
    items: NDArray[np.int64]
    times: NDArray[np.int64]

    @property
    def rows(self) -> Mapping[str, int]:
        """Number of ratings of each split."""
        held_out = int(np.sum(self._held_out))
        return {"train": len(self.users) - held_out, "test": held_out}

    def write(self, file: h5py.File, kind: str) -> Names:
        """Write the ratings to `file`, a new dataset file of the collection `kind`; return its header.

        Raises `UserError` if no user has two ratings, or a user has left fewer than `OTHERS` items unrated.
        """
        user_names, user = np.unique(self.users, return_inverse=True)
        item_names, item = np.unique(self.items, return_inverse=True)
        pairs = np.stack([user, item], axis=1).astype(np.int32)
        held_out = self._held_out
        if not held_out.any():
            raise UserError(f"{self.source}: no user has two ratings: nothing can be held out for testing")
        names = Names(kind, user_names, item_names)
        names.write(file)
        _write(file.create_group("train"), "x", pairs[~held_out])
        with located(self.source):
            others = _others(pairs, pairs[held_out, 0], names)
        _write(file.create_group("test"), "x", np.concatenate([pairs[held_out], others], axis=1))
        return names

    @cached_property
    def _held_out(self) -> NDArray[np.bool_]:
        """True [n] for the ratings that are held out for tests.

        They are the latest rating of each user with two or more; of equally late ones, the last in the file.
        """
        order = np.lexsort([self.times, self.users])  # lexsort is stable
        users = self.users[order]
        change = users[1:] != users[:-1]
        last, first = np.append(change, True), np.append(True, change)
        held_out = np.zeros(len(users), bool)
        held_out[order] = last & ~first
        return held_out


def _others(pairs: NDArray[np.int32], users: NDArray[np.int32], names: Names) -> NDArray[np.int32]:
    """Return, for each of `users`, `OTHERS` items that the user has not rated: int32 [len(users), OTHERS].

    `pairs` has all ratings, as user and item.
    """
    count = len(names.items)
    by_user = pairs[np.argsort(pairs[:, 0], kind="stable")]
    starts = np.searchsorted(by_user[:, 0], np.arange(len(names.users) + 1))
    drawn = np.empty((len(users), OTHERS), np.int32)
    for row, user in enumerate(users.tolist()):
        rated = by_user[starts[user] : starts[user + 1], 1]
        if count - len(rated) < OTHERS:
            raise UserError(
                f"user {names.users[user]} has rated {len(rated)} of {count} items: to test on, "
                f"{OTHERS} others are needed"
            )
        drawn[row] = distinct(OTHERS, count, set(rated.tolist()), user)
    return drawn


def _write(group: h5py.File | h5py.Group, name: str, values: NDArray[np.generic]) -> None:
    chunks = (min(len(values), ROWS_A_CHUNK), *values.shape[1:])
    little_endian = values.astype(values.dtype.newbyteorder("<"))
    group.create_dataset(name, data=little_endian, chunks=chunks, fletcher32=True)
