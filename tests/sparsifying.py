"""DEFT's algorithm 1 and the selections for it, in plain numpy, without ranks, kernels and buckets."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from references import MakeOptimizer, Synchronize, batch, fill_gradients, gathered_step, loss, model, vector

Select = Callable[[Sequence[np.ndarray], Sequence[int], int], np.ndarray]
"""Returns the joint indices, given acc of all workers, the sizes of the layers, and t = 0, 1, …"""


def largest(acc: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-np.abs(acc), kind="stable")[:k]


def of(density: float, acc: np.ndarray) -> int:
    return max(1, round(density * acc.size))


def topk(density: float) -> Select:
    return lambda accs, sizes, t: np.unique(np.concatenate([largest(a, of(density, a)) for a in accs]))


def clt_k(density: float) -> Select:
    def select(accs: Sequence[np.ndarray], sizes: Sequence[int], t: int) -> np.ndarray:
        leader = accs[t % len(accs)]
        return np.sort(largest(leader, of(density, leader)))

    return select


def threshold(least: float) -> Select:
    return lambda accs, sizes, t: np.flatnonzero(np.max([np.abs(a) for a in accs], axis=0) >= least)


def deft(density: float, exact: bool = False) -> Select:
    def select(accs: Sequence[np.ndarray], sizes: Sequence[int], t: int) -> np.ndarray:
        n, k = len(accs), of(density, accs[0])
        pieces = pieces_of(sizes, n)
        ks = [
            shares([float(np.linalg.norm(acc[p])) for p in pieces], list(map(len, pieces)), k) for acc in accs
        ]
        bins = packed([len(p) for p in pieces], ks[t % n], n)
        moved_on = t % n + t // n  # bins move by one in every step, and by one more every n steps
        if exact:
            ks = [ks[t % n]] * n
        chosen = [
            pieces[i][largest(accs[worker][pieces[i]], ks[worker][i])]
            for worker in range(n)
            for i in bins[(worker + moved_on) % n]
        ]
        return np.sort(np.concatenate(chosen))

    return select


class Micro:
    """MiCRO's selection, which adapts its threshold λ after every step."""

    def __init__(self, density: float) -> None:
        self.density, self.least = density, 0.0

    def __call__(self, accs: Sequence[np.ndarray], sizes: Sequence[int], t: int) -> np.ndarray:
        n, M, k = len(accs), accs[0].size, of(self.density, accs[0])
        if t == 0:
            self.least = float(np.linalg.norm(accs[0])) / (2 * math.sqrt(k))
        parts, found = self.parts(M, n), dict[int, np.ndarray]()
        for worker, acc in enumerate(accs):
            part = parts[(worker + t) % n]
            mine = part[np.abs(acc[part]) >= self.least]
            found[(worker + t) % n] = mine if mine.size or not part.size else part[[t % part.size]]
        counts = [found[i].size for i in range(n)]
        ratio = sum(counts) / k
        self.least *= 1.005 if ratio > 1.1 else 0.995 if ratio <= 0.909 else 1.00125
        self.learn(counts, M)
        return np.sort(np.concatenate(list(found.values())))

    def parts(self, M: int, n: int) -> list[np.ndarray]:
        return np.split(np.arange(M), even(M, n)[:-1])

    def learn(self, counts: list[int], M: int) -> None:
        """Change nothing: MiCRO adapts only λ."""


class Exdyna(Micro):
    """ExDyna's selection, which also adapts the number of blocks of each worker.

    With `slopes`, a worker's count is compared with its neighbor's instead of the mean.
    """

    def __init__(self, density: float, slopes: bool = False) -> None:
        super().__init__(density)
        self.slopes, self.blocks = slopes, list[int]()

    def parts(self, M: int, n: int) -> list[np.ndarray]:
        if not self.blocks:
            self.blocks = np.diff(even(min(1024, M // self.size(M)), n), prepend=0).tolist()
        ends = [self.size(M) * stop for stop in itertools.accumulate(self.blocks)]
        return np.split(np.arange(M), ends[:-1])

    def size(self, M: int) -> int:
        return M // 1024 // 32 * 32 if M >= 1024 * 32 else max(1, M // 1024)

    def learn(self, counts: list[int], M: int) -> None:
        k, mean, blocks = [float(x) for x in counts], sum(counts) / len(counts), self.blocks

        def gives(one: int, other: int) -> bool:
            if self.slopes:
                return k[one] > 1.05 * k[other]
            return k[one] > 1.05 * mean and k[other] < mean / 1.05

        for pair in itertools.pairwise(range(len(k))):
            for one, other in (pair, pair[::-1]):
                if gives(one, other):
                    if blocks[one] - 1 >= sum(blocks) / (4 * len(blocks)):
                        blocks[one], blocks[other] = blocks[one] - 1, blocks[other] + 1
                        moved = sum(counts) * self.size(M) / M
                        k[one], k[other] = k[one] - moved, k[other] + moved
                    break


def even(total: int, n: int) -> list[int]:
    """Return the ends of n parts of nearly equal size."""
    return [total * (i + 1) // n for i in range(n)]


def pieces_of(sizes: Sequence[int], n: int) -> list[np.ndarray]:
    """Return the indices of each piece. A layer is cut into as few pieces as possible of at most M/n."""
    M, start, pieces = sum(sizes), 0, []
    for size in sizes:
        parts = next(p for p in range(1, size + 1) if p == size or size / p <= M / n)
        cuts = [start + size * i // parts for i in range(parts + 1)]
        pieces += [np.arange(*ends) for ends in itertools.pairwise(cuts)]
        start += size
    return pieces


def shares(norms: Sequence[float], sizes: Sequence[int], k: int) -> list[int]:
    """Return each layer's part of k by algorithm 3. Earlier layers take what later ones have no room for."""
    given = [0] * len(norms)
    order = sorted(range(len(norms)), key=lambda i: -norms[i])
    for place, i in enumerate(order):
        left, norm_left = k - sum(given), sum(norms[j] for j in order[place:])
        later = sum(sizes[j] for j in order[place + 1 :])
        share = round(left * norms[i] / norm_left) if norm_left else 0
        given[i] = max(min(share, sizes[i]), left - later)
    return given


def packed(sizes: Sequence[int], k: Sequence[int], n: int) -> list[list[int]]:
    """Return the layers of each bin by algorithm 4."""
    costs = [s * max(1, math.log2(each)) if each else 0 for s, each in zip(sizes, k, strict=True)]
    bins: list[list[int]] = [[] for _ in range(n)]
    for i in sorted(range(len(sizes)), key=lambda i: -costs[i]):
        min(bins, key=lambda b: sum(costs[j] for j in b)).append(i)
    return bins


def sparsified(
    P: int, K: int, select: Select, make: MakeOptimizer, steps: int, synchronize: Synchronize | None = None
) -> list[list[Tensor]]:
    """Train P nets, each by K workers with algorithm 1, and call `synchronize` after every step.

    Returns:
        The parameters as [step][group].
    """
    nets = [model() for _ in range(P)]
    optimizers = [make(list(net.parameters())) for net in nets]
    M = vector(nets[0]).numel()
    e = np.zeros((P, K, M))
    selects = [copy.deepcopy(select) for _ in range(P)]  # one for each group, because some have state
    history = []
    for t in range(steps):
        for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            if K == 1:  # there are no other ranks to send gradients to
                gathered_step(net, optimizer, t, range(g, g + 1))
                continue
            acc = e[g] + np.stack([backwards_gradient(net, t, g * K + i) for i in range(K)])
            sizes = [p.numel() for p in reversed(list(net.parameters()))]
            joint = selects[g](list(acc), sizes, t)
            mean = np.zeros(M)
            mean[joint] = acc[:, joint].mean(0)
            acc[:, joint] = 0
            e[g] = acc
            put_backwards(net, mean)
            optimizer.step()
        if synchronize is not None:
            synchronize(t + 1, nets, 0.0)
        history.append([vector(net) for net in nets])
    return history


def backwards_gradient(net: torch.nn.Module, t: int, rank: int) -> np.ndarray:
    """Return a rank's gradient as a vector that begins with the last parameter, as buckets do."""
    net.zero_grad()
    loss(net, *batch(t, rank)).backward()
    fill_gradients(net)
    grads = [p.grad for p in net.parameters()]
    return np.concatenate([g.reshape(-1).numpy() for g in reversed(grads) if g is not None])


def put_backwards(net: torch.nn.Module, values: np.ndarray) -> None:
    stop = values.size
    for p in net.parameters():
        p.grad = torch.from_numpy(values[stop - p.numel() : stop].copy()).view_as(p)
        stop -= p.numel()
