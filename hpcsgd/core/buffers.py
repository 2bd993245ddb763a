"""The tensors of a model other than trained parameters: buffers and frozen parameters.

All ranks get the tensors of rank 0 when the optimizer is made. After that, floating-point and complex buffers
are averaged over all ranks: in `averaged_model()`, and when a checkpoint continues on other ranks. 8-bit
floats are averaged in float32. Of all other tensors (integers, booleans, sparse and quantized ones) each rank
keeps its own values. When a checkpoint continues on other ranks, all get those of rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from hpcsgd import torch_private
from hpcsgd.comm import Communicator
from hpcsgd.core.elements import as_reals
from hpcsgd.core.fsdp import is_fsdp


def is_dense(x: Tensor) -> bool:
    """Return whether memory has one number for each element of `x`, which is neither sparse nor quantized."""
    return x.layout == torch.strided and not x.is_quantized


def is_averaged(x: Tensor) -> bool:
    """Return whether a buffer like `x` is averaged over the ranks."""
    return is_dense(x) and (x.is_floating_point() or x.is_complex())


def averaged_buffers(model: nn.Module) -> list[Tensor]:
    """Return views of the real numbers in all buffers of `model` that are averaged over the ranks."""
    return [as_reals(x) for x in model.buffers() if is_averaged(x)]


def places(model: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Yield for each buffer the dict in which its module keeps it, its key in that dict, and the buffer."""
    tables = [torch_private.buffers_of(m) for m in model.modules()]
    return ((table, key, x) for table in tables for key, x in table.items() if x is not None)


def make_writable(model: nn.Module) -> None:
    """Replace buffers that cannot be written in place with copies that can.

    Such buffers are expanded or conjugated, or were made in inference mode.
    """
    copies: dict[Tensor, Tensor] = {}
    for table, key, x in places(model):
        if not _is_writable(x):
            table[key] = copies.setdefault(x, _plain(x))


def make_parameters_writable(params: Iterable[nn.Parameter]) -> None:
    """Copy parameters that cannot be written in place to new memory, except those of FSDP models."""
    for param in params:
        if not is_fsdp(param) and not _is_writable(param):
            param.data = _plain(param.detach())


def widened(x: Tensor) -> Tensor:
    """Return `x` as float64 or complex128, so that a mean computed from it is rounded only once."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def put(x: Tensor, values: Tensor) -> None:
    """Copy `values` into `x`, which is dense, sparse or quantized as `values` is."""
    here = values.to(x.device)
    if x.is_quantized:
        x.data = here  # replaces the scale, too
        return
    if x.layout != torch.strided:
        x.detach().resize_as_sparse_(here)
    x.copy_(here)


def share(x: Tensor, ranks: Communicator) -> None:
    """Set `x` on all `ranks` to its bits on rank 0 of `ranks`; collective."""
    if is_dense(x):
        here = x.detach().contiguous()
        bits = here.view(-1).view(torch.uint8)
        ranks.bcast(bits).wait()
        x.copy_(here)
    else:
        put(x, ranks.gather_objects(x.detach().cpu() if ranks.rank == 0 else None)[0])


def _is_writable(x: Tensor) -> bool:
    if x.is_inference():
        return False
    if not is_dense(x):
        return True
    reach = 1  # elements spanned by the dimensions so far
    for stride, size in sorted(zip(x.stride(), x.size(), strict=True)):
        if size > 1 and stride < reach:
            return False
        reach += stride * (size - 1)
    return not (x.is_conj() or x.is_neg())


def _plain(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
