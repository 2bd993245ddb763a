"""Store nested containers of tensors, arrays and plain values in HDF5, and read them.

One HDF5 dataset has the containers and all short values as JSON. Each longer tensor is a dataset of its own.
All datasets have checksums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import count
from typing import Any

import h5py
import numpy as np
from torch import Tensor

from hpcsgd.checkpoint import structure
from hpcsgd.checkpoint.structure import UnreadTensor

Tree = dict[Any, Any]
Item = Any
"""A part of a stored tree, with `structure.Unread` in place of tensors and arrays."""
_STRUCTURE = "structure"


def write(file: h5py.Group, tree: Mapping[Any, Any]) -> None:
    """Store `tree`: containers of tensors, arrays, strings, numbers and None (see `structure`).

    Raises `UserError` for anything else; the error names it.
    """
    numbers = count()

    def store(vector: Tensor) -> int:
        number = next(numbers)
        _add(file, str(number), vector.numpy())
        return number

    text = structure.encoded(tree, store)
    _add(file, _STRUCTURE, np.frombuffer(text.encode(), np.uint8))


def read(file: h5py.Group) -> Any:
    """Return the tree that `write` stored. Its tensors are on the CPU and contiguous."""
    return read_item(items(file))


def items(of: h5py.Group | Item) -> dict[Any, Item]:
    """Return the items of a stored tree, or of a dict in a tree, by key. Tensors and arrays stay unread."""
    if not isinstance(of, h5py.Group):
        return of
    text: Any = of[_STRUCTURE]
    return structure.decoded(text[()].tobytes(), lambda number: of[str(number)])


def read_item(item: Item) -> Any:
    """Return the value of an item, after reading all tensors and arrays in it."""
    return structure.read(item)


def read_slice(tensor: Item, start: int, stop: int) -> Tensor:
    """Return elements [start, stop) of a stored vector, or rows [start, stop) of a stored matrix."""
    assert isinstance(tensor, UnreadTensor)
    return tensor.rows(start, stop)


def digest(tree: Any) -> str:
    """Return a hash of the content that `write` would store for `tree`.

    Raises `UserError` as `write` does.
    """
    digest = hashlib.sha256()
    numbers = count()

    def store(vector: Tensor) -> int:
        digest.update(np.ascontiguousarray(vector.numpy()).view(np.uint8).data)
        return next(numbers)

    digest.update(structure.encoded(tree, store).encode())
    return digest.hexdigest()


def _add(file: h5py.Group, name: str, vector: np.ndarray[Any, Any]) -> None:
    file.create_dataset(name, data=vector, chunks=True, fletcher32=True)
