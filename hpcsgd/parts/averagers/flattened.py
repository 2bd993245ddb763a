"""Average many small tensors in a few large messages: all tensors of one dtype become one flat vector."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hpcsgd.comm import Communicator
from hpcsgd.errors import UserError, count_text


def average_flattened(
    tensors: Sequence[Tensor],
    ranks: Communicator,
    further: Callable[[Sequence[Tensor]], None] = lambda joined: None,
) -> None:
    """Set `tensors` to their means over all `ranks`, changed by `further` if it is given. Collective.

    `further` gets the means, as a list with one flat vector per dtype, and may change them in place. All
    ranks must have tensors of the same sizes and dtypes: see `require_same_layout`.
    """
    dtypes = dict.fromkeys(_dtype_of_sums(x) for x in tensors)
    alike = [[x for x in tensors if _dtype_of_sums(x) == dtype] for dtype in dtypes]
    joined = [
        torch.cat([x.to(dtype).reshape(-1) for x in some]) for dtype, some in zip(dtypes, alike, strict=True)
    ]
    for vector in joined:
        ranks.allreduce(vector, "mean").wait()
    further(joined)
    for of_dtype, vector in zip(alike, joined, strict=True):
        for x, mean in zip(of_dtype, vector.split([x.numel() for x in of_dtype]), strict=True):
            x.copy_(mean.view_as(x))


def require_same_layout(
    named: Mapping[str, Sequence[Tensor]], ranks: Communicator, what: str, who: str = "group"
) -> None:
    """Raise `UserError` on all `ranks` unless their tensors have the same sizes and dtypes. Collective.

    `named` has tensors by name. In the message, `what` is what differs, and `who` is what each rank stands
    for. The check sends 16 bytes. Without it, MPI would silently mix up vectors of different lengths.
    """
    layout = {name: [f"{x.numel()} of {x.dtype}" for x in tensors] for name, tensors in named.items()}
    sum_of_it = zlib.crc32(repr(layout).encode())
    extremes = torch.tensor([sum_of_it, -sum_of_it], device="cpu")
    ranks.allreduce(extremes, "max").wait()
    if extremes.sum() == 0:
        return
    counts = {name: sum(x.numel() for x in tensors) for name, tensors in named.items()}
    everyone = ranks.gather_objects(
        ", ".join(f"{count_text(n, 'element')} of {name}" for name, n in counts.items())
    )
    other = next((i for i, theirs in enumerate(everyone) if theirs != everyone[0]), 0)
    raise UserError(f"{what} differ between {who}s: {everyone[0]} in {who} 0, {everyone[other]} in {other}")


def _dtype_of_sums(x: Tensor) -> torch.dtype:
    """Return the dtype in which x is summed: its own, or float32 for 8-bit floats, which cannot be added."""
    return torch.float32 if x.element_size() == 1 else x.dtype
