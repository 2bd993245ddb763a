"""The kernels in torch's own operations, for tensors on any device.

They are used where no native library works: on AMD and Intel GPUs, and for operations that csrc/cuda/ lacks.
Only `encode` waits for the device, since the host has to know the number of bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcsgd.kernels.reference import integers

_BITS = 7  # bits of an index per byte of its code
_INDEX_BITS = 32


def largest(x: Tensor, starts: Tensor, stops: Tensor, k: Tensor) -> Tensor:
    """Do what `hpcsgd.kernels.largest` does, by `torch.topk` of an integer per element.

    The integer consists of the element's magnitude and its index, so no two are equal. `x` has at most 32
    bits per element, and segments have less than 2³² elements.
    """
    parts = [torch.empty(0, dtype=torch.int64, device=x.device)]
    for start, stop, count in zip(*map(integers, (starts, stops, k)), strict=True):
        if count > 0:
            parts.append(start + _of_segment(x[start:stop], count))
    return torch.cat(parts)


def _of_segment(x: Tensor, k: int) -> Tensor:
    n = x.numel()
    assert n < 1 << _INDEX_BITS
    magnitudes = x.float().abs().nan_to_num(torch.nan, torch.inf)  # makes all NaNs alike, and a copy
    keys = magnitudes.view(torch.int32).long() << _INDEX_BITS
    keys += torch.arange(n - 1, -1, -1, device=x.device)  # of equal magnitudes the lowest index is largest
    places = keys.topk(k, sorted=False).values & ((1 << _INDEX_BITS) - 1)
    return (n - 1 - places).sort().values


def encode(indices: Tensor, bound: int) -> Tensor:
    """Do what `hpcsgd.kernels.encode` does, for `indices` that are all below `bound`."""
    gaps = indices.diff(prepend=indices.new_full((1,), -1)) - 1
    most = max(1, -(-(bound - 1).bit_length() // _BITS))  # bytes of an index
    sizes = torch.ones_like(gaps)
    for byte in range(1, most):
        sizes += gaps >> _BITS * byte > 0
    ends = sizes.cumsum(0)
    length = int(ends[-1]) if indices.numel() else 0
    code = torch.empty(
        length + 1, dtype=torch.uint8, device=indices.device
    )  # the last byte receives values that are not part of the code
    for byte in range(most):
        follows = sizes > byte + 1
        value = (gaps >> _BITS * byte & 0x7F) | follows.long() << _BITS
        place = torch.where(sizes > byte, ends - sizes + byte, length)
        code.scatter_(0, place, value.to(torch.uint8))
    return code[:length]


def decode(code: Tensor, count: int) -> Tensor:
    """Return the `count` indices in `code`, a result of `encode`, without checking that it is one."""
    last = code < 0x80
    first = last.roll(1)  # True for byte 0, too, because the last byte of the code ends an index
    number = first.cumsum(0) - 1  # for each byte of the code, the number of the index it belongs to
    places = torch.arange(code.numel(), device=code.device)
    none = torch.zeros(count, dtype=torch.int64, device=code.device)
    begins = none.index_add(0, number, places * first)
    parts = (code & 0x7F).long() << _BITS * (places - begins[number])
    gaps = none.index_add(0, number, parts)
    return (gaps + 1).cumsum(0) - 1
