"""What the kernels compute, in plain torch and numpy: any dtype and device, slowly."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcsgd.errors import UserError


def accumulate(acc: Tensor, g: Tensor, starts: Tensor) -> Tensor:
    acc += g
    g.zero_()
    segments = torch.split(acc, integers(starts.diff()))
    return torch.stack([segment.double().square().sum() for segment in segments])


def largest(x: Tensor, starts: Tensor, stops: Tensor, k: Tensor) -> Tensor:
    parts = [torch.empty(0, dtype=torch.int64, device=x.device)]
    for start, stop, count in zip(*map(integers, (starts, stops, k)), strict=True):
        # torch sorts NaN above infinity, and equal elements stay in order.
        order = x[start:stop].abs().sort(descending=True, stable=True).indices
        parts.append(start + order[:count].sort().values)
    return torch.cat(parts)


def above(x: Tensor, threshold: float) -> Tensor:
    passing = (x.double().abs() >= threshold) | x.isnan()
    return passing.nonzero().flatten()


def encode(indices: Tensor) -> Tensor:
    values = indices.cpu().numpy()
    if (values[:1] < 0).any() or (values[1:] <= values[:-1]).any():
        raise UserError("indices to encode must ascend strictly from 0 or more")
    gaps = np.diff(values, prepend=-1) - 1
    groups = np.ones_like(gaps)
    for bits in range(7, 63, 7):
        groups += gaps >> bits > 0
    ends = groups.cumsum()
    shifts: NDArray[np.int64] = 7 * (np.arange(int(groups.sum())) - np.repeat(ends - groups, groups))
    code = (np.repeat(gaps, groups) >> shifts & 0x7F).astype(np.uint8) | np.uint8(0x80)
    code[ends - 1] &= 0x7F
    return torch.as_tensor(code, device="cpu").to(indices.device)


def decode(code: Tensor, count: int) -> Tensor:
    groups = code.cpu().numpy()
    ends = (groups < 0x80).nonzero()[0] + 1
    lengths = np.diff(ends, prepend=0)
    if ends.size != count or groups.size != lengths.sum() or lengths.max(initial=0) > 9:
        raise UserError("bytes that are not the code of so many indices")
    shifts = 7 * (np.arange(groups.size) - np.repeat(ends - lengths, lengths))
    parts = (groups & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
    gaps = np.add.reduceat(parts, ends - lengths) if count else parts
    indices = np.cumsum(gaps + np.uint64(1), dtype=np.uint64) - np.uint64(1)
    if (indices >= 2**63).any():
        raise UserError("bytes that are not the code of so many indices")
    return torch.as_tensor(indices.astype(np.int64), device="cpu").to(code.device)


def integers(x: Tensor) -> list[int]:
    """Of a tensor on the CPU."""
    return [int(number) for number in x]
