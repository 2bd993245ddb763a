"""Convert tensors and arrays of any kind to vectors that NumPy can represent, and back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcsgd import torch_private
from hpcsgd.errors import UserError

_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def require_kept(x: Tensor) -> None:
    """Raise `UserError` for a tensor that does not consist of plain numbers."""
    what = "a quantized tensor" if x.is_quantized else "a nested tensor" if x.is_nested else ""
    if x.is_meta:
        raise UserError("a tensor on the meta device has no values, and cannot be saved in a checkpoint")
    if what:
        raise UserError(f"{what} cannot be saved in a checkpoint")


def described(dtype: np.dtype[Any]) -> Any:
    """Return a NumPy dtype as plain values. Raises `UserError` for one that holds more than numbers."""
    if not dtype.hasobject and dtype.isbuiltin != 2:
        descr = np.lib.format.dtype_to_descr(dtype)
        if np.lib.format.descr_to_dtype(descr) == dtype:
            return descr
    raise UserError(f"an array of {dtype} cannot be saved in a checkpoint: convert it to numbers")


def made_array(descr: Any, shape: list[int], data: Tensor) -> np.ndarray[Any, Any]:
    """Return the array with a dtype described by `described`, a shape, and the bytes in `data`."""
    return np.ndarray(shape, np.lib.format.descr_to_dtype(descr), data.numpy())


def parts_of_sparse(x: Tensor) -> list[Any]:
    """Return the layout, the size and the dense tensors of which the sparse tensor x consists."""
    if x.layout == torch.sparse_coo:
        parts = [*torch_private.parts_of_coo(x)]
    elif x.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [x.crow_indices(), x.col_indices(), x.values()]
    else:
        parts = [x.ccol_indices(), x.row_indices(), x.values()]
    return [str(x.layout).removeprefix("torch."), list(x.size()), parts]


def made_sparse(layout: str, size: list[int], parts: list[Tensor]) -> Tensor:
    """Return the sparse tensor for a result of `parts_of_sparse`."""
    kind = getattr(torch, layout)
    if kind == torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, size, check_invariants=True)
    slow, fast, values = parts
    return torch.sparse_compressed_tensor(slow, fast, values, size, layout=kind, check_invariants=True)


def from_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
    """Return a new vector of this dtype with the bytes `data`."""
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().view(dtype)


@functools.cache
def carrier_of(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which a type unknown to NumPy, such as bfloat16, is stored, or None."""
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return _WIDTHS[dtype.itemsize]
    return None
