"""The definition of what the kernels compute, in plain torch and numpy: slow, for any dtype or device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcsgd.errors import UserError

OF_THE_MEAN = 1.4
"""The scale of 2-bit numbers as a multiple of the mean magnitude. The best multiple is 1.3 for normally
distributed elements, and 1.7 for the Laplace distribution."""


def accumulate(acc: Tensor, g: Tensor, starts: Tensor) -> Tensor:
    acc += g
    g.zero_()
    segments = torch.split(acc, integers(starts.diff()))
    return torch.stack([segment.double().square().sum() for segment in segments])


def largest(x: Tensor, starts: Tensor, stops: Tensor, k: Tensor) -> Tensor:
    parts = [torch.empty(0, dtype=torch.int64, device=x.device)]
    for start, stop, count in zip(*map(integers, (starts, stops, k)), strict=True):
        # torch sorts NaN above infinity, and a stable sort keeps the order of equal elements.
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


def pack(x: Tensor, code: Tensor, block: int, bits: int, draw: int | None) -> None:
    n, blocks, most = x.numel(), -(-x.numel() // block), largest_number(bits)
    rows = x.new_zeros(blocks * block)
    rows[:n] = x
    rows = rows.view(blocks, block)
    scales = _by_the_mean(rows, n) if bits == 2 else _by_the_largest(rows, most)
    values = rows / scales[:, None]  # divided by a tensor: by a number, torch multiplies with its inverse
    values = (
        values.round() if draw is None else (values + chances(values.numel(), draw, x).view_as(rows)).floor()
    )
    least = -2 if bits == 2 else -most
    values = values.masked_fill_(~(scales.abs() > 0)[:, None], 0).clamp_(least, most)
    numbers = values.view(-1)[:n].to(torch.int8)
    code[: 4 * blocks].view(torch.float32).copy_(scales)
    code[4 * blocks :].copy_(numbers.view(torch.uint8) if bits == 8 else _joined(numbers, bits))


def unpack(code: Tensor, out: Tensor, block: int, bits: int) -> None:
    n, blocks = out.numel(), -(-out.numel() // block)
    numbers = code[4 * blocks :]
    numbers = numbers.view(torch.int8) if bits == 8 else _split(numbers, bits)
    rows = numbers.new_zeros(blocks * block)
    rows[:n] = numbers[:n]
    scales = code[: 4 * blocks].view(torch.float32)
    out.copy_((rows.view(blocks, block).float() * scales[:, None]).view(-1)[:n])


def largest_number(bits: int) -> int:
    """Return the largest number that `bits` bits can hold, sign included."""
    return (1 << bits - 1) - 1


def chances(n: int, draw: int, like: Tensor) -> Tensor:
    """Return n random numbers in [0, 1) of 24 bits each, a different sequence for each `draw`."""
    low = 0xFFFFFFFF
    bits = (torch.arange(n, device=like.device) * 0x9E3779B1 + draw) & low
    bits = ((bits ^ bits >> 16) * 0x85EBCA6B) & low
    bits = ((bits ^ bits >> 13) * 0xC2B2AE35) & low
    return ((bits ^ bits >> 16) >> 8).float() * 2.0**-24


def _by_the_largest(rows: Tensor, most: int) -> Tensor:
    largest = rows.abs().amax(1)
    return (largest / torch.full_like(largest, most)).masked_fill_(~largest.isfinite(), torch.nan)


def _by_the_mean(rows: Tensor, n: int) -> Tensor:
    """Return the scale of each block of 2-bit numbers: `OF_THE_MEAN` times the block's mean magnitude.

    2-bit numbers are −2, −1, 0 and 1. The scale is negative if the element of largest magnitude is positive,
    so that −2 can stand for it. Sums are added in a fixed order, so that all kernels give the same bits.
    """
    blocks, block = rows.shape
    partial_sums = rows.new_zeros((blocks, 8), dtype=torch.float64)
    for part in rows.abs().view(blocks, block // 8, 8).unbind(1):
        partial_sums += part
    partial_sums = partial_sums[:, :4] + partial_sums[:, 4:]
    sums = (partial_sums[:, 0] + partial_sums[:, 1]) + (partial_sums[:, 2] + partial_sums[:, 3])
    counts = torch.full_like(sums, block)
    counts[-1:] = n - (blocks - 1) * block
    sizes = OF_THE_MEAN * sums / counts
    scales = sizes.clamp_max(torch.finfo(torch.float32).max / 2).float()  # twice the scale must be finite
    up, down = rows.amax(1).clamp_min(0), (-rows).amax(1).clamp_min(0)
    return torch.where(up >= down, -scales, scales).masked_fill_(~sizes.isfinite(), torch.nan)


def _joined(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers of `bits` bits into bytes, the first in the lowest bits; pad the last byte with zeros."""
    some = 8 // bits
    parts = numbers.new_zeros(-(-numbers.numel() // some) * some)
    parts[: numbers.numel()] = numbers
    columns = (parts.view(torch.uint8) & (1 << bits) - 1).view(-1, some).unbind(1)
    return torch.stack([column << i * bits for i, column in enumerate(columns)]).sum(0, dtype=torch.uint8)


def _split(code: Tensor, bits: int) -> Tensor:
    mask, sign = (1 << bits) - 1, 1 << bits - 1
    parts = torch.stack([code >> shift & mask for shift in range(0, 8, bits)], 1).view(-1)
    return (parts ^ sign).to(torch.int8) - sign


def integers(x: Tensor) -> list[int]:
    """Return the elements of a tensor on the CPU as ints."""
    return [int(number) for number in x]
