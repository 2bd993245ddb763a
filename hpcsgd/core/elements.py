"""What an element of a tensor is, in memory and in flat vectors of reals.

A complex number is a pair of reals. Flat vectors, and all that is done with them and sent of them, know reals
alone. Complex parameters and their gradients are views of these vectors, and the user's optimizer finds
complex elements. torch's own optimizers treat the two parts of one as two reals, too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hpcsgd.errors import UserError

PAIRS = (torch.complex64, torch.complex128)


def reals_per_element(x: Tensor) -> int:
    """Return how many reals one element of `x` is."""
    return 2 if x.is_complex() else 1


def num_reals(tensors: Iterable[Tensor]) -> int:
    """Return how many reals all of these have together."""
    return sum(x.numel() * reals_per_element(x) for x in tensors)


def as_reals(x: Tensor) -> Tensor:
    """Return the reals of `x`: those of a complex tensor are a view of one more dimension, or a copy where
    `x` is conjugated and its memory holds other numbers."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_elements(flat: Tensor, reals: int) -> Tensor:
    """Return the vector of elements, each of `reals` numbers, that `flat` is a vector of; a view."""
    return flat if reals == 1 else torch.view_as_complex(flat.view(-1, reals))


def in_rows(flat: Tensor, reals: int) -> Tensor:
    """Return `flat` with a row for each element, where elements are of several reals; a view, and of any
    type."""
    return flat if reals == 1 else flat.view(-1, reals)


def shaped(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """The elements of `flat` from `offset` on, in the shape and memory order of `like`."""
    return flat.as_strided(like.size(), like.stride(), flat.storage_offset() + offset)


def require_alike(name: str, found: Tensor, expected: Tensor) -> None:
    """Raise `UserError` if a parameter has another shape, type or device than at the wrapping."""
    if (found.shape, found.dtype, found.device) != (expected.shape, expected.dtype, expected.device):
        raise UserError(
            f"the optimizer made parameter {name} one of {found.dtype} and shape {list(found.shape)} on "
            f"{found.device}; it was {expected.dtype}, {list(expected.shape)} on {expected.device}"
        )


def require_real(name: str, param: Tensor) -> None:
    """Raise `UserError` for a complex parameter where torch is to shard the model."""
    if param.is_complex():
        raise UserError(
            f"parameter {name} is of {param.dtype}, and complex ones cannot be sharded by rows: leave fsdp, "
            "or fully_shard, out"
        )


def require_dense(name: str, param: Tensor) -> None:
    """Raise `UserError` for a parameter that is no view of a part of a vector of reals."""
    if param.layout != torch.strided:
        raise UserError(f"parameter {name} has layout {param.layout}; only dense tensors can be averaged")
    if param.is_complex() and param.dtype not in PAIRS:
        raise UserError(
            f"parameter {name} is of {param.dtype}, for which torch lacks most operations: make it one of "
            "torch.complex64"
        )
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.size(), strict=True)):
        if size != 1:
            if stride != expected:
                raise UserError(
                    f"parameter {name} of strides {param.stride()}: its elements are not dense in memory"
                )
            expected *= size
