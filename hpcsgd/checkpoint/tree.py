"""Nested containers of tensors and plain values as HDF5: groups of checksummed datasets."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from hpcsgd.errors import UserError, located

Tree = dict[Any, Any]
Item = Any  # h5py.Group | h5py.Dataset, whose own types leave everything open
_TYPE = "torch dtype"  # of datasets that hold a tensor
_ARRAY = "array"  # of those that were an array of numpy
_KIND = "kind"  # of a group: which container it was
_KEYS = "keys"  # of a group, in order: dict keys may be ints or hold a slash
_PLAIN = (str, int, float, type(None))
_KEY = (str, int)
_NUMBERS = "biufc"  # kinds of arrays that torch has types for
_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_SPARSE = "sparse"  # the kind of a group that holds a sparse tensor


def write(group: h5py.Group, tree: Mapping[Any, Any]) -> None:
    """Store `tree`: dicts, Counters, lists and tuples of tensors, arrays, strings, numbers and None.

    Raises `UserError` naming what is none of these.
    """
    _write_children(group, "counter" if isinstance(tree, Counter) else "dict", tree.items())


def read(group: Item) -> Any:
    """What `write` stored; tensors are on the CPU and contiguous."""
    children = {key: read_item(item) for key, item in items(group).items()}
    match group.attrs[_KIND]:
        case "list":
            return list(children.values())
        case "tuple":
            return tuple(children.values())
        case "counter":
            return Counter(children)
        case "sparse":
            return _joined(**children)
    return children


def items(group: Item) -> dict[Any, Item]:
    """The unread children of a group by their keys."""
    return {key: group[str(number)] for number, key in enumerate(json.loads(group.attrs[_KEYS]))}


def read_item(item: Item) -> Any:
    """One child: a container, a tensor or a plain value."""
    if isinstance(item, h5py.Group):
        return read(item)
    if _TYPE in item.attrs:
        tensor = _as_tensor(item, item[()]).reshape([int(n) for n in item.attrs["shape"]])
        return tensor.numpy() if _ARRAY in item.attrs else tensor
    return json.loads(item.asstr()[()])


def read_slice(dataset: Item, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of a stored one-dimensional tensor."""
    return _as_tensor(dataset, dataset[start:stop])


def _write_children(group: h5py.Group, kind: str, children: Iterable[tuple[Any, Any]]) -> None:
    keys = []
    for number, (key, value) in enumerate(children):
        if not isinstance(key, _KEY):
            raise UserError(f"key {key!r}: a {type(key).__name__} cannot be a key in a checkpoint")
        keys.append(key)
        _write_item(group, str(number), key, value)
    group.attrs[_KIND] = kind
    group.attrs[_KEYS] = json.dumps(keys)


def _write_item(group: h5py.Group, name: str, key: str | int, value: Any) -> None:
    if isinstance(value, Tensor) and value.is_quantized:
        raise UserError(f"{key}: a quantized tensor cannot be saved in a checkpoint")
    if isinstance(value, Tensor) and value.layout != torch.strided:
        _write_children(group.create_group(name), _SPARSE, parts_of_sparse(value).items())
    elif isinstance(value, Tensor):
        _write_tensor(group, name, value)
    elif isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS:
        _write_tensor(group, name, torch.tensor(value, device="cpu"))
        group[name].attrs[_ARRAY] = True
    elif isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
        _write_item(group, name, key, value.item())
    elif isinstance(value, Mapping):
        with located(str(key)):
            write(group.create_group(name), value)
    elif _is_json(value):
        group.create_dataset(name, data=json.dumps(value))
    elif isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        with located(str(key)):
            _write_children(group.create_group(name), kind, enumerate(value))
    else:
        raise UserError(f"{key}: a {type(value).__name__} cannot be saved in a checkpoint")


def _is_json(value: Any) -> bool:
    """Whether JSON gives back the same; long lists of numbers then need not become a group each."""
    return isinstance(value, _PLAIN) or (type(value) is list and all(_is_json(item) for item in value))


def _write_tensor(group: h5py.Group, name: str, value: Tensor) -> None:
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    carrier = _carrier(plain.dtype)
    data = plain.view(carrier) if carrier else plain
    chunked = {"chunks": True, "fletcher32": True} if data.numel() else {}
    dataset = group.create_dataset(name, data=data.reshape(-1).numpy(), **chunked)
    dataset.attrs["shape"] = list(value.shape)
    dataset.attrs[_TYPE] = str(value.dtype).removeprefix("torch.")


def _as_tensor(dataset: Item, data: Any) -> Tensor:
    dtype = getattr(torch, str(dataset.attrs[_TYPE]))
    tensor = torch.from_numpy(data)
    return tensor.view(dtype) if _carrier(dtype) else tensor


@functools.cache
def _carrier(dtype: torch.dtype) -> torch.dtype | None:
    """Return in whose place numbers are stored of which numpy has no type, such as bfloat16."""
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return _WIDTHS[dtype.itemsize]
    return None


def parts_of_sparse(x: Tensor) -> Tree:
    """Return the dense tensors that a sparse one is made of."""
    x = x.detach().cpu()
    if x.layout == torch.sparse_coo:
        parts = [x._indices(), x._values()]
    elif x.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [x.crow_indices(), x.col_indices(), x.values()]
    else:
        parts = [x.ccol_indices(), x.row_indices(), x.values()]
    return {"layout": str(x.layout), "size": list(x.size()), "parts": parts}


def _joined(layout: str, size: list[int], parts: list[Tensor]) -> Tensor:
    kind = getattr(torch, layout.removeprefix("torch."))
    if kind == torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, size, check_invariants=True)
    slow, fast, values = parts
    return torch.sparse_compressed_tensor(slow, fast, values, size, layout=kind, check_invariants=True)
