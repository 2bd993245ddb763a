"""Which k of n elements were chosen, in bytes whose number n and k alone decide: receivers know it before.

P. Elias: Efficient Storage and Retrieval by Content and Address of Static Files, J. ACM 1974; R. Fano, 1971.
Of each index the l = ⌊log₂(n/k)⌋ low bits are written as they are; the rest of them, which ascend, as a one
at place (index >> l) + i for the i-th. That takes k·l + k + ((n−1) >> l) bits: 8 an index for 64 of 4096.
Where one bit an element is no longer, from a density of about 1/4 on, it is that. Of all n, or none, nothing
is said.

No code of all choices can be shorter than `entropy`. This one is at most 1.2 times as long up to a density of
1/8, but for what rounding up to a byte adds.

This is what csrc/chosen.cpp computes, slowly; bits go from the low end of a byte on, and each segment has
whole bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcsgd.errors import UserError
from hpcsgd.kernels.reference import integers


def entropy(n: int, k: int) -> float:
    """log₂ of the number of ways to choose k of n: bits that say which one, on the mean, at least."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def code_bytes(n: Tensor, k: Tensor) -> int:
    """Of segments of n[i] elements of which k[i] are chosen, 0 ≤ k ≤ n: int64, on the CPU."""
    sizes, counts = n.numpy(), k.numpy()
    some = (counts > 0) & (counts < sizes)
    sizes, counts = sizes[some], counts[some]
    low = np.frexp((sizes // counts).astype(np.float64))[1] - 1
    bits = np.minimum(counts * low + counts + (sizes - 1 >> low), sizes)
    return int(((bits + 7) // 8).sum())


def encode(indices: Tensor, starts: Tensor, stops: Tensor, k: Tensor, code: Tensor) -> None:
    done = written = 0
    for start, stop, count in _segments(starts, stops, k):
        form = _Form(stop - start, count)
        mine = indices[done : done + count].numpy() - start
        if count and ((np.diff(mine, prepend=-1) <= 0).any() or mine[-1] >= form.n):
            raise UserError("indices to encode must ascend strictly from 0 or more")
        part = np.packbits(form.written(mine), bitorder="little")
        code[written : written + part.size] = torch.as_tensor(part, device="cpu")
        done, written = done + count, written + part.size


def decode(code: Tensor, starts: Tensor, stops: Tensor, k: Tensor, indices: Tensor) -> None:
    done = read = 0
    for start, stop, count in _segments(starts, stops, k):
        form = _Form(stop - start, count)
        size = (form.bits + 7) // 8
        mine = form.read(np.unpackbits(code[read : read + size].numpy(), bitorder="little"))
        if mine.size != count or (np.diff(mine, prepend=-1) <= 0).any() or (mine >= form.n).any():
            raise UserError("bytes that are not the code of so many indices")
        indices[done : done + count] = torch.as_tensor(mine + start, device="cpu")
        done, read = done + count, read + size


def _segments(starts: Tensor, stops: Tensor, k: Tensor) -> list[tuple[int, int, int]]:
    return list(zip(integers(starts), integers(stops), integers(k), strict=True))


@dataclass(frozen=True)
class _Form:
    """How k of n are written."""

    n: int
    k: int

    @property
    def low(self) -> int:
        return (self.n // self.k).bit_length() - 1

    @property
    def bits(self) -> int:
        if self.k in (0, self.n):
            return 0
        return min(self.k * self.low + self.k + (self.n - 1 >> self.low), self.n)

    @property
    def map(self) -> bool:
        return self.bits == self.n

    def written(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        bits = np.zeros(self.bits, np.uint8)
        if not self.bits:
            return bits
        if self.map:
            bits[indices] = 1
            return bits
        lows = indices[:, None] >> np.arange(self.low) & 1
        bits[: lows.size] = lows.reshape(-1)
        bits[lows.size + (indices >> self.low) + np.arange(self.k)] = 1
        return bits

    def read(self, bits: NDArray[np.uint8]) -> NDArray[np.int64]:
        if not self.bits:
            return np.arange(self.k)
        if self.map:
            return bits.nonzero()[0]
        ones = bits[self.k * self.low :].nonzero()[0]
        if ones.size != self.k:
            return ones[:0]
        lows = bits[: self.k * self.low].reshape(self.k, self.low).astype(np.int64)
        return ones - np.arange(self.k) << self.low | (lows << np.arange(self.low)).sum(1)
