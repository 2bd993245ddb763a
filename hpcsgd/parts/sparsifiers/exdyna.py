"""ExDyna: MiCRO with parts whose sizes change until all workers select about as many elements.

D. Yoon, S. Oh: Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning,
CCGrid 2024, arXiv:2402.13781. Of M elements, n workers are to send k = density·M in total. In step t:

    partition   there are 1024 blocks of ⌊M/1024⌋ elements, rounded down to a multiple of 32. A part is some
                consecutive blocks, and the last part has the remaining elements, too. At first all parts have
                as many blocks. Worker r searches part (t + r) mod n
    select      as in MiCRO: all elements of the part with |acc| ≥ λ
    adapt       λ as in MiCRO. Then, with k_i elements selected in part i and k̄ = k'/n, for i = 0 … n−2:
                if k_i > 1.05·k̄ and k_{i+1} < k̄/1.05, part i gives one block to part i+1, and if it is the
                other way round, it takes one. No part gets below 1024/(4n) blocks. k_i and k_{i+1} change by
                k'·(block size)/M, what a block has on average

Traffic is set by the largest selection, which this evens out. Blocks move only between neighbours on opposite
sides of the mean. So if the density of large elements falls evenly from the first part to the last, hardly
any move: with 8 parts of densities from 4 to 0.5, the largest selection stays 1.68 times the mean. With
`compare_neighbours` the two neighbours are compared with each other: part i gives a block if k_i >
1.05·k_{i+1}, and takes one if it is the other way round. In the example 1.16 times the mean is left.

Differences from the authors' code, in addition to those of MiCRO:

- If n does not divide 1024, the numbers of blocks differ by one at first.
- If M < 32·1024, a block has ⌊M/1024⌋ elements, at least 1, and there are at most M blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator
from hpcsgd.core.state import State
from hpcsgd.parts.sparsifiers.base import Accumulated, Expected, Share, require_density
from hpcsgd.parts.sparsifiers.micro import Threshold, evenly, share_of

BLOCKS = 1024
"""The number of blocks of all parts together."""
GRANULE = 32
"""Blocks have a multiple of this number of elements, unless they would have none."""
TOLERANCE = 1.05
"""The ratio of two numbers of selected elements from which on they count as different."""

Uneven = Callable[[float, float, float], bool]
"""True if a part with the first number of elements, and its neighbour with the second and smaller one, are to
exchange a block. The third number is the mean over all parts."""


def around_mean(more: float, fewer: float, mean: float) -> bool:
    """The rule of the paper: the two parts are on opposite sides of the mean."""
    return more > TOLERANCE * mean and fewer < mean / TOLERANCE


def between_neighbours(more: float, fewer: float, mean: float) -> bool:
    """The rule for slopes: one part has more than its neighbour."""
    return more > TOLERANCE * fewer


@checked
class ExDyna:
    """ExDyna: MiCRO whose parts change in size until all workers select about as many elements.

    As with `MiCRO`, each worker compares the elements of one part with a common threshold, which follows the
    density. After each step, parts with many selected elements give a block of elements to neighbours with
    few.

    Args:
        density: Approximate fraction d of the elements that is sent, > 0 and ≤ 1: k = d·M, rounded, at
            least 1. The mean over many steps is some percent lower.
        compare_neighbours: If False, two neighbouring parts exchange a block if one has more than 1.05 times
            the mean number of selected elements and the other less than 1/1.05 of it. If True, they do so
            whenever one has more than 1.05 times as many as the other. Default False, as in the paper, which
            does little if the numbers fall evenly from the first part to the last.

    Raises:
        UserError: If `density` is outside these bounds.

    Shape:
        The first step broadcasts 8 bytes, the later ones nothing but indices and values.

    Example:
        >>> grad_reduce = hpcsgd.Sparse(hpcsgd.ExDyna(density=0.1, compare_neighbours=True))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.bsp(grad_reduce))
        >>> train(optimizer, steps=1)
        >>> optimizer.metrics["imbalance"] >= 1    # the largest selection over the mean
        True

    References:
        D. Yoon, S. Oh: Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep
        Learning, CCGrid 2024, arXiv:2402.13781.

    See Also:
        `MiCRO`: equal parts.
    """

    disjoint = True

    def __init__(self, density: float, compare_neighbours: bool = False) -> None:
        require_density(density)
        self.density, self.compare_neighbours = density, compare_neighbours
        self._threshold = Threshold(density)
        self._uneven: Uneven = between_neighbours if compare_neighbours else around_mean
        self._blocks: list[int] = []

    def cut(self, layers: Tensor, n: int) -> Tensor:
        return layers

    def share(self, x: Accumulated, t: int, workers: Communicator) -> Share:
        self._threshold.begin(x, workers)
        M, n = x.acc.numel(), workers.size
        if len(self._blocks) != n:  # they may be those of the lazy start of `pier`, among all ranks
            self._blocks = even_blocks(M, n)
        part = (t + workers.rank) % n
        start = sum(self._blocks[:part]) * block_size(M)
        stop = start + self._blocks[part] * block_size(M) if part < n - 1 else M
        return share_of(start, stop, t)

    def select(self, x: Accumulated, share: Share) -> Tensor:
        return self._threshold.select(x, share)

    def adapt(self, counts: Sequence[int], t: int, M: int) -> None:
        self._threshold.adapt(sum(counts), M)
        n = len(counts)
        k = [counts[(part - t) % n] for part in range(n)]
        self._blocks = moved(self._blocks, k, sum(k) * block_size(M) / M, self._uneven)

    def expected(self, M: int, layers: Sequence[int], n: int) -> Expected:
        return evenly(self.density, M, n)

    def state_dict(self) -> State:
        """Return the threshold and the blocks of each part, the same for all workers of this group."""
        return State(mean={"threshold": self._threshold.value}, per_rank={"blocks": self._blocks})

    def load_state_dict(self, state: State) -> None:
        self._threshold.value = state.mean.get("threshold", 0.0)
        self._blocks = state.per_rank.get("blocks", [])


def block_size(M: int) -> int:
    """Return the number of elements of a block, if there are M elements."""
    size = M // BLOCKS
    return size // GRANULE * GRANULE or max(1, size)


def even_blocks(M: int, n: int) -> list[int]:
    """Return the numbers of blocks with which the n parts begin; they differ by at most one."""
    blocks = min(BLOCKS, M // block_size(M))
    return [blocks * (part + 1) // n - blocks * part // n for part in range(n)]


def moved(blocks: Sequence[int], k: Sequence[float], per_block: float, uneven: Uneven) -> list[int]:
    """Return the number of blocks of each part after those that move, where k[i] elements were in part i.

    With a block, `per_block` of these elements count as moved.
    """
    blocks, k, n = list(blocks), list(k), len(blocks)
    mean, least = sum(k) / n, sum(blocks) / (4 * n)
    for i in range(n - 1):
        giver, taker = (i, i + 1) if k[i] > k[i + 1] else (i + 1, i)
        if uneven(k[giver], k[taker], mean) and blocks[giver] - 1 >= least:
            blocks[giver] -= 1
            blocks[taker] += 1
            k[giver] -= per_block
            k[taker] += per_block
    return blocks
