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


def pack(x: Tensor, code: Tensor, block: int, bits: int, draw: int | None) -> None:
    n, blocks, most = x.numel(), -(-x.numel() // block), largest_number(bits)
    rows = x.new_zeros(blocks * block)
    rows[:n] = x
    rows = rows.view(blocks, block)
    largest = rows.abs().amax(1)
    scales = (largest / torch.full_like(largest, most)).masked_fill_(~largest.isfinite(), torch.nan)
    values = rows / scales[:, None]  # by a tensor: torch multiplies by what a number is the inverse of
    values = (
        values.round() if draw is None else (values + chances(values.numel(), draw, x).view_as(rows)).floor()
    )
    values = values.masked_fill_(~(scales > 0)[:, None], 0).clamp_(-most, most)
    numbers = values.view(-1)[:n].to(torch.int8)
    code[: 4 * blocks].view(torch.float32).copy_(scales)
    code[4 * blocks :].copy_(numbers.view(torch.uint8) if bits == 8 else _two_a_byte(numbers))


def unpack(code: Tensor, out: Tensor, block: int, bits: int) -> None:
    n, blocks = out.numel(), -(-out.numel() // block)
    numbers = code[4 * blocks :]
    numbers = numbers.view(torch.int8) if bits == 8 else _by_halves(numbers)
    rows = numbers.new_zeros(blocks * block)
    rows[:n] = numbers[:n]
    scales = code[: 4 * blocks].view(torch.float32)
    out.copy_((rows.view(blocks, block).float() * scales[:, None]).view(-1)[:n])


def largest_number(bits: int) -> int:
    """In magnitude, of what travels in so many bits."""
    return (1 << bits - 1) - 1


def chances(n: int, draw: int, like: Tensor) -> Tensor:
    """Numbers from 0 on and below 1, of 24 random bits: another sequence for every `draw`."""
    low = 0xFFFFFFFF
    bits = (torch.arange(n, device=like.device) * 0x9E3779B1 + draw) & low
    bits = ((bits ^ bits >> 16) * 0x85EBCA6B) & low
    bits = ((bits ^ bits >> 13) * 0xC2B2AE35) & low
    return ((bits ^ bits >> 16) >> 8).float() * 2.0**-24


def _two_a_byte(numbers: Tensor) -> Tensor:
    """Of 4 bits each, the first in the lower half; an odd one has a zero beside it."""
    halves = numbers.new_zeros(-(-numbers.numel() // 2) * 2)
    halves[: numbers.numel()] = numbers
    low, high = (halves.view(torch.uint8) & 0xF).view(-1, 2).unbind(1)
    return low | high << 4


def _by_halves(code: Tensor) -> Tensor:
    halves = torch.stack([code & 0xF, code >> 4], 1).view(-1)
    return (halves ^ 8).to(torch.int8) - 8


def integers(x: Tensor) -> list[int]:
    """Of a tensor on the CPU."""
    return [int(number) for number in x]
