"""Nested dicts of tensors and plain values as HDF5: dicts become groups, tensors checksummed datasets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import h5py
import torch
from torch import Tensor

Tree = dict[str, Any]
_TYPE = "torch dtype"  # of datasets that numpy has no type for
_KEYS = "keys"  # of a group, in order, with their kind: dict keys may be ints or hold a slash
_CARRIERS = {torch.bfloat16: torch.int16}


def write(group: h5py.Group, tree: Mapping[Any, Any]) -> None:
    """Store `tree`; leaves that are no tensors must be JSON (tuples become lists)."""
    keys = []
    for number, (key, value) in enumerate(tree.items()):
        keys.append(key)
        name = str(number)
        if isinstance(value, Mapping):
            write(group.create_group(name), value)
        elif isinstance(value, Tensor):
            _write_tensor(group, name, value)
        else:
            group.create_dataset(name, data=json.dumps(value))
    group.attrs[_KEYS] = json.dumps(keys)


def read(group: h5py.Group) -> Tree:
    """What `write` stored."""
    return {key: read_item(item) for key, item in items(group).items()}


def items(group: h5py.Group) -> dict[Any, h5py.Group | h5py.Dataset]:
    """The unread children of a group by their keys."""
    return {key: group[str(number)] for number, key in enumerate(json.loads(group.attrs[_KEYS]))}


def read_slice(dataset: h5py.Dataset, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of a stored one-dimensional tensor."""
    return _as_tensor(dataset, dataset[start:stop])


def is_vector(item: h5py.Group | h5py.Dataset) -> bool:
    """Whether an unread child is a tensor of one dimension."""
    return _TYPE in item.attrs and len(item.attrs["shape"]) == 1


def _write_tensor(group: h5py.Group, name: str, value: Tensor) -> None:
    plain = value.detach().cpu().contiguous()
    carrier = _CARRIERS.get(plain.dtype)
    data = plain.view(carrier) if carrier else plain
    chunked = {"chunks": True, "fletcher32": True} if data.numel() else {}
    dataset = group.create_dataset(name, data=data.reshape(-1).numpy(), **chunked)
    dataset.attrs["shape"] = list(value.shape)
    dataset.attrs[_TYPE] = str(value.dtype).removeprefix("torch.")


def read_item(item: h5py.Group | h5py.Dataset) -> Any:
    """One child: a dict, a tensor or a plain value."""
    if isinstance(item, h5py.Group):
        return read(item)
    if _TYPE in item.attrs:
        return _as_tensor(item, item[()]).reshape([int(n) for n in item.attrs["shape"]])
    return json.loads(item.asstr()[()])


def _as_tensor(dataset: h5py.Dataset, data: Any) -> Tensor:
    dtype = getattr(torch, str(dataset.attrs[_TYPE]))
    tensor = torch.from_numpy(data)
    return tensor.view(dtype) if dtype in _CARRIERS else tensor
