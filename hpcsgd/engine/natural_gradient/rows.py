"""The matrices X and Y of a layer, from its inputs and from the derivatives of its outputs.

A row is a sample; for a convolution, one spatial position of a sample. The layer multiplies X by its weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hpcsgd.errors import UserError

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
GOLDEN = (math.sqrt(5) - 1) / 2


def weight_of(module: nn.Module) -> nn.Parameter | None:
    """Return the weight of a supported layer: linear, or convolution of one group, with a plain parameter."""
    if not isinstance(module, nn.Linear | Convolution):
        return None
    if isinstance(module, Convolution) and module.groups > 1:
        return None
    weight: object = module.weight  # a computed tensor if the weight is parametrized
    if not isinstance(weight, nn.Parameter):
        return None
    if nn.parameter.is_lazy(weight):
        raise UserError("parameters of the model have no shape yet: give it a batch before it is wrapped")
    return weight


def input_rows(module: nn.Module, x: Tensor, n: int, shift: float) -> Tensor | None:
    """Return at most n rows [n, D] of the input `x`, or None if the layer does not accept its shape.

    For a convolution D = C · kernel size, in the order of the weight's elements.
    """
    if isinstance(module, nn.Linear):
        return _pick(x, x.dim() - 1, n, shift) if x.shape[-1] == module.in_features else None
    assert isinstance(module, Convolution)
    view = _patches(module, x)
    return None if view is None else _pick(view, view.dim() // 2, n, shift)


def output_rows(module: nn.Module, g: Tensor, n: int, shift: float) -> Tensor:
    """Return at most n rows [n, D_out] of g, the derivatives with respect to the output."""
    if isinstance(module, Convolution):
        g = g.movedim(g.dim() - len(module.kernel_size) - 1, -1)
    return _pick(g, g.dim() - 1, n, shift)


def _patches(conv: Convolution, x: Tensor) -> Tensor | None:
    """Return a view [b, *positions, C, *kernel] of the padded input: b samples of C channels.

    None if `x` does not have the shape of an input of `conv`.
    """
    k = len(conv.kernel_size)
    if x.dim() == k + 1:
        x = x[None]
    if x.dim() != k + 2 or x.shape[1] != conv.in_channels:
        return None
    before_after = _padding(conv)
    if any(before_after):
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = pad(x, before_after, mode=mode)
    extents = [d * (size - 1) + 1 for d, size in zip(conv.dilation, conv.kernel_size, strict=True)]
    ends = zip(x.shape[2:], extents, conv.stride, strict=True)
    positions = [(length - extent) // step + 1 for length, extent, step in ends]
    b, c, *spatial = x.stride()
    steps = [stride * step for stride, step in zip(spatial, conv.stride, strict=True)]
    inside = [stride * d for stride, d in zip(spatial, conv.dilation, strict=True)]
    sizes = [x.shape[0], *positions, x.shape[1], *conv.kernel_size]
    return x.as_strided(sizes, [b, *steps, c, *inside])


def _padding(conv: Convolution) -> list[int]:
    """Return the padding before and after each axis, the last axis first, as `pad` takes it."""
    found: list[int] = []
    for i in reversed(range(len(conv.kernel_size))):
        if conv.padding == "same":
            total = conv.dilation[i] * (conv.kernel_size[i] - 1)
            found += [total // 2, total - total // 2]
        elif isinstance(conv.padding, str):  # "valid"
            found += [0, 0]
        else:
            found += [conv.padding[i]] * 2
    return found


def _pick(x: Tensor, lead: int, n: int, shift: float) -> Tensor:
    """Return a copy of at most n rows of `x`, whose first `lead` axes count rows.

    The golden ratio spreads the selected rows evenly. A fixed stride could select the same column of every
    image. `shift`, from 0 to 1, changes the selection.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    shape = x.shape[:lead]
    total = math.prod(shape)
    if total <= n:
        return x.reshape(total, math.prod(x.shape[lead:])).to(dtype, copy=True)
    places = (torch.arange(n, dtype=torch.float64, device=x.device) * GOLDEN + shift).frac() * total
    # Offsets in memory are four times as fast as indexing a view of many axes.
    starts = torch.zeros_like(rest := places.long())
    for size, stride in zip(reversed(shape), reversed(x.stride()[:lead]), strict=True):
        starts += rest % size * stride
        rest //= size
    within = _offsets(x.shape[lead:], x.stride()[lead:], x.device)
    end = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    memory = x.as_strided((end,), (1,))
    return memory.index_select(0, (starts[:, None] + within).view(-1)).view(n, -1).to(dtype)


def _offsets(shape: Sequence[int], strides: Sequence[int], device: torch.device) -> Tensor:
    """Return the offsets in memory of all elements of a tensor of this shape from its first, in order."""
    found = torch.zeros(1, dtype=torch.long, device=device)
    for size, stride in zip(shape, strides, strict=True):
        found = (found[:, None] + torch.arange(size, device=device) * stride).view(-1)
    return found
