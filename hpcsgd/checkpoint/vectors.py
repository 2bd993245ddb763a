"""Convert tensors and arrays of any dtype and layout to vectors that NumPy can represent, and back."""

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
    """Raise `UserError` for a tensor that cannot be saved: on the meta device, quantized or nested."""
    what = "a quantized tensor" if x.is_quantized else "a nested tensor" if x.is_nested else ""
    if x.is_meta:
        raise UserError("a tensor on the meta device has no values, and cannot be saved in a checkpoint")
    if what:
        raise UserError(f"{what} cannot be saved in a checkpoint")


def described(dtype: np.dtype[Any]) -> Any:
    """Return a NumPy dtype as strings and lists. Raises `UserError` for a dtype of objects, not numbers."""
    if not dtype.hasobject and dtype.isbuiltin != 2:
        descr = np.lib.format.dtype_to_descr(dtype)
        if np.lib.format.descr_to_dtype(descr) == dtype:
            return descr
    raise UserError(f"an array of {dtype} cannot be saved in a checkpoint: convert it to numbers")


def made_array(descr: Any, shape: list[int], data: Tensor) -> np.ndarray[Any, Any]:
    """Return the array of this `shape` with the bytes `data`. `descr` is its dtype, as from `described`."""
    return np.ndarray(shape, np.lib.format.descr_to_dtype(descr), data.numpy())


def parts_of_sparse(x: Tensor) -> list[Any]:
    """Return the layout, the size and the dense tensors (indices, values) of the sparse tensor x."""
    if x.layout == torch.sparse_coo:
        parts = [*torch_private.parts_of_coo(x)]
    elif x.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [x.crow_indices(), x.col_indices(), x.values()]
    else:
        parts = [x.ccol_indices(), x.row_indices(), x.values()]
    return [str(x.layout).removeprefix("torch."), list(x.size()), parts]


def made_sparse(layout: str, size: list[int], parts: list[Tensor]) -> Tensor:
    """Return the sparse tensor from the three results of `parts_of_sparse`."""
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
    """Return the integer dtype as which `dtype` is stored if NumPy lacks it (bfloat16), else None."""
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return _WIDTHS[dtype.itemsize]
    return None
