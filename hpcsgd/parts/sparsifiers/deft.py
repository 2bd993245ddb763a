"""DEFT: each worker selects gradients of some layers, and of layers with larger gradients more.

D. Yoon, S. Oh: DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable Gradient
Sparsification, ICPP 2023 ("algorithm …" below refers to it). Of M elements, n workers send k:

    partition   algorithm 2: a layer of more than M/n elements is cut into equal pieces, which then count as
                layers
    assign      algorithm 3: k is divided among the layers by the norms of their accumulated gradients
    allocate    algorithm 4: the layers are assigned to n bins of about equal cost. Worker t mod n does this
                for all in step t. The bins rotate over the workers, so that every worker sends its
                accumulated gradient of each layer in some step
    select      algorithm 5: each worker selects the top k_layer elements of each layer in its bin

The index sets of the workers are disjoint, so their union does not grow with n, the number of workers. Each
worker searches M/n of the M elements, and selection time falls faster than 1/n (eq. 9).

Differences from the paper, and from its authors' code:

- A layer of more than M/n elements is cut into ⌈size·n/M⌉ pieces, whose sizes differ by at most one element.
  This is the least number of pieces of at most M/n elements; the authors cut into n. Each piece adds work in
  every step: to assign its k, to search it and to broadcast its bin. ResNet-18 has 72 pieces for 16 workers
  and 117 for 64; with the authors' rule it has 122 and 566.
- If a layer has fewer elements than its part of k, the remaining number is added to the layers after it, so
  that always Σ k_layer = k. In eq. 3, log k of a layer with k = 1 counts as 1, and a layer with k = 0 costs
  nothing.
- Worker r gets bin (t + ⌊t/n⌋ + r) mod n; in the authors' code it is (t + r) mod n. The latter repeats with
  the same period as the worker that decides. If the workers have different norms, and so assign layers to
  different bins, one worker may always get the same layer. Then the accumulated gradients of the other
  workers for this layer grow without bound.
- Worker t mod n assigns layers to bins by its own norms. With `exact` False, each worker computes k_layer
  from its own norms, so that about k elements are sent, as in the paper. With `exact` True, worker
  t mod n also broadcasts its k_layer, 4 bytes per layer, and exactly k elements are sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd import kernels
from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator, phase
from hpcsgd.core.balance import largest_first
from hpcsgd.errors import UserError
from hpcsgd.parts.sparsifiers.base import Accumulated, Expected, Share, require_density, wanted


@checked
@dataclass(frozen=True)
class Deft:
    """DEFT: the workers divide the search by layers and select more where gradients are larger.

    Each of n workers searches about M/n elements. Their selections are disjoint, so the number of sent
    elements does not grow with n.

    Args:
        density: Fraction d of the elements that is sent, > 0 and ≤ 1: k = d·M, rounded, at least 1.
        exact: If True, worker t mod n decides in step t how many elements of each layer are sent, for 4 more
            bytes per layer, and exactly k elements are sent. If False, each worker uses its own norms, and
            about k are sent. Default False, as in the paper.
        floor: Least number of elements sent of each layer, even if the sum exceeds k. The authors' code has
            1. Default 0.

    Raises:
        UserError: If `density` is outside these bounds, or `floor` is negative.

    Shape:
        A step broadcasts 4 bytes per layer, with `exact` 8.

    Example:
        >>> grad_reduce = hpcsgd.Sparse(hpcsgd.Deft(density=0.1, exact=True))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.bsp(grad_reduce))
        >>> train(optimizer, steps=1)
        >>> round(optimizer.metrics["density"] * 67)     # the model has 67 parameters
        7

    References:
        D. Yoon, S. Oh: DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable Gradient
        Sparsification, ICPP 2023, algorithms 2 to 5.

    See Also:
        `TopK`: every worker searches the whole model.
    """

    density: float
    exact: bool = False
    floor: int = 0
    disjoint = True

    def __post_init__(self) -> None:
        require_density(self.density)
        if self.floor < 0:
            raise UserError(
                f"floor = {self.floor}: a number of elements of each layer, ≥ 0",
                key="floor",
                value=self.floor,
            )

    def cut(self, layers: Tensor, n: int) -> Tensor:
        return partition(layers, n)

    def share(self, x: Accumulated, t: int, workers: Communicator) -> Share:
        k, bins = share_out(x, wanted(self.density, x.acc.numel()), self.floor, workers.size)
        if workers.size > 1:
            decision = torch.stack([bins, k.int()]) if self.exact else bins.view(1, -1)
            with phase("allocation"):
                workers.bcast(decision, t % workers.size).wait()
            bins, k = decision[0], decision[1].long() if self.exact else k
        mine = torch.nonzero(bins == bin_of(workers.rank, t, workers.size)).view(-1)
        return Share(x.bounds[mine], x.bounds[mine + 1], k[mine])

    def expected(self, M: int, layers: Sequence[int], n: int) -> Expected:
        pieces = partition(torch.tensor([0, *itertools.accumulate(layers)], device="cpu"), n).numel() - 1
        k = wanted(self.density, M)
        nbytes = 4 * pieces * (2 if self.exact else 1)
        return Expected(M, each=k / n, joint=k, searched=M / n, allocation=nbytes)

    def select(self, x: Accumulated, share: Share) -> Tensor:
        return share.largest_of(x.acc)


def share_out(x: Accumulated, k: int, floor: int, n: int) -> tuple[Tensor, Tensor]:
    """Return k_layer (int64) and bin (int32) of every layer, from this worker's norms, on the CPU."""
    library, squared_norms = kernels.native(), x.squared_norms.cpu()
    if library is not None:
        return library.share_out(squared_norms, x.bounds, k, floor, n)
    sizes = x.bounds.diff().tolist()
    ks = assign(squared_norms.sqrt().tolist(), sizes, k, floor)
    bins = torch.tensor(allocate(sizes, ks, n), dtype=torch.int32, device="cpu")
    return torch.tensor(ks, device="cpu"), bins


def bin_of(rank: int, t: int, n: int) -> int:
    """Return the bin that worker `rank` of n searches in step t.

    In n consecutive steps, a worker gets each bin number once. In n² steps it gets each bin number once from
    each worker that assigns layers to bins.
    """
    return (rank + t + t // n) % n


def partition(layers: Tensor, n: int) -> Tensor:
    """Cut the layers into pieces of at most M/n elements, and return their bounds (int64); algorithm 2."""
    bounds = layers.tolist()
    M, cut = bounds[-1], [0]
    for start, stop in itertools.pairwise(bounds):
        size = stop - start
        pieces = min(size, -(-size * n // M))  # ⌈size / (M/n)⌉
        cut += [start + size * (i + 1) // pieces for i in range(pieces)]
    return torch.tensor(cut, device="cpu")


def assign(norms: list[float], sizes: list[int], k: int, floor: int = 0) -> list[int]:
    """Return k_layer of every layer, with Σ k_layer = k; algorithm 3.

    Each layer gets at least `floor` elements (or all that it has), even if the sum exceeds k.
    """
    norms = _finite(norms)
    order = sorted(range(len(norms)), key=lambda layer: -norms[layer])
    sums = list(itertools.accumulate(norms[layer] for layer in reversed(order)))
    k_layer, k_remain, room = [0] * len(norms), k, sum(sizes)
    for layer, norm_remain in zip(order, reversed(sums), strict=True):
        room -= sizes[layer]
        share = round(k_remain * norms[layer] / norm_remain) if norm_remain > 0 else 0
        k_layer[layer] = max(min(share, sizes[layer], k_remain), k_remain - room)
        k_remain -= k_layer[layer]
    return [max(chosen, min(floor, size)) for chosen, size in zip(k_layer, sizes, strict=True)]


def _finite(norms: list[float]) -> list[float]:
    """Return `norms`, or 1 for NaN and infinity and 0 for the others if any norm is not finite.

    Layers with such values then are selected first, so that all workers get these values in the same step.
    """
    if all(map(math.isfinite, norms)):
        return norms
    return [0.0 if math.isfinite(norm) else 1.0 for norm in norms]


def allocate(sizes: list[int], k: list[int], n: int) -> list[int]:
    """Return the bin, 0 … n−1, of every layer; algorithm 4.

    The layers are placed in order of falling cost, each in the bin with the least cost so far.
    """
    costs = [size * max(1.0, math.log2(each)) if each else 0.0 for size, each in zip(sizes, k, strict=True)]
    return largest_first(costs, n)
