"""A code for the indices of k selected elements of n; its length depends on n and k only.

So receivers know the length before they receive the code. P. Elias: Efficient Storage and Retrieval by
Content and Address of Static Files, J. ACM 1974; R. Fano, 1971.

The l = ⌊log₂(n/k)⌋ low bits of each index are written unchanged. The high parts ascend: for the i-th index
bit (index >> l) + i is one. That takes k·l + k + ((n−1) >> l) bits: 8 per index for 64 of 4096 elements. From
a density of about 1/4 on, a map of one bit per element is not longer, and the code is that map. If all n
elements or none are selected, the code is empty.

No code for all selections has fewer bits on average than `entropy`. Up to a density of 1/8 this code is at
most 1.2 times as long, except for rounding up to a byte.

csrc/chosen.cpp computes the same codes, fast. Bits are stored from the low end of a byte on, and each segment
has whole bytes.
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
    """Return log₂ of the number of ways to select k of n elements: the least mean bits of any code."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def code_bytes(n: Tensor, k: Tensor) -> int:
    """Return the bytes that code which elements are selected: in segment i, k[i] of n[i] elements.

    `n` and `k` are int64, on the CPU, with 0 ≤ k ≤ n.
    """
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
    """The code for one segment of n elements of which k are selected: its size, and its bits."""

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
