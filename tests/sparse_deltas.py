"""SparseLoCo, written a second time in plain numpy, on whole vectors in the order of buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from packing import Arrives, by_blocks, filled
from references import Synchronize, model

Select = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
"""Returns the indices of the elements that each group sends, ascending, given e of all groups. Each e has the
size of the model."""


def as_bfloat16(x: float) -> np.float32:
    """Round to bfloat16, to the nearest number, or to the even one of two."""
    bits = int(np.float32(x).view(np.uint32))
    return np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(np.float32)


def two_sizes(x: np.ndarray, block: int = 64) -> np.ndarray:
    """Quantize to two bits per value: the sign, and whether the magnitude is above the mean of its block.

    If a block contains a zero, all values up to the mean become 0.
    """
    arrived = np.zeros(len(x), np.float32)
    for low in range(0, len(x), block):
        part = x[low : low + block].astype(np.float32)
        sizes = np.abs(part).astype(float)
        large = sizes > sizes.mean()
        for which in (large, ~large):
            size = as_bfloat16(sizes[which].mean()) if which.any() else np.float32(0)
            size = np.float32(0) if which is not large and (sizes == 0).any() else size
            arrived[low : low + block][which] = np.where(part[which] < 0, -size, size)
    return arrived


ARRIVES: dict[int, Arrives] = {
    2: two_sizes,
    4: by_blocks(4, 64),
    8: by_blocks(8, 256),
    16: lambda x: np.array([as_bfloat16(each) for each in x], np.float32),
    32: lambda x: x.astype(np.float32),
}


def top(e: np.ndarray, k: int) -> np.ndarray:
    return np.sort(np.argsort(-np.abs(e), kind="stable")[:k])


def elements() -> int:
    """Return the number of the model's elements. The padding behind them is never sent."""
    return sum(p.numel() for p in model().parameters())


def per_run(size: int, density: float, K: int) -> Select:
    def select(errors: Sequence[np.ndarray]) -> list[np.ndarray]:
        found: list[list[np.ndarray]] = [[] for _ in errors]
        n, M = len(errors[0]) // K, elements()
        for shard in range(0, n * K, n):
            for low in range(shard, min(shard + n, M), size):
                high = min(low + size, shard + n, M)
                k = max(1, round(density * (high - low)))
                for mine, e in zip(found, errors, strict=True):
                    mine.append(low + top(e[low:high], k))
        return [np.concatenate(mine) for mine in found]

    return select


def over_positions(run: int, density: float, K: int) -> Select:
    """Return a selection that divides k among blocks by their norms.

    The block with the largest norm is first. Each block takes its part of the elements that remain.
    """

    def select(errors: Sequence[np.ndarray]) -> list[np.ndarray]:
        n, M = len(errors[0]) // K, elements()
        runs = [
            (low, min(low + run, shard + n, M))
            for shard in range(0, n * K, n)
            for low in range(shard, min(shard + n, M), run)
        ]
        norms = [float(np.sqrt(sum((e[low:high] ** 2).sum() for e in errors))) for low, high in runs]
        left, k = max(1, round(density * M)), [0] * len(runs)
        order = sorted(range(len(runs)), key=lambda i: -norms[i])
        for place, i in enumerate(order):
            rest = order[place:]
            others = sum(runs[j][1] - runs[j][0] for j in rest[1:])
            total = sum(norms[j] for j in rest)
            part = round(left * norms[i] / total) if total else 0
            k[i] = max(min(part, runs[i][1] - runs[i][0], left), left - others)
            left -= k[i]
        return [
            np.concatenate(
                [low + top(e[low:high], each) for (low, high), each in zip(runs, k, strict=True)]
            ).astype(int)
            for e in errors
        ]

    return select


def sparse_synchronizations(
    every: int,
    K: int,
    select: Select,
    bits: int = 2,
    beta: float = 0.95,
    lr: float | Mapping[int, float] = 1.0,
    *,
    over_senders: bool = False,
    clips: bool = False,
) -> Synchronize:
    """Return SparseLoCo's synchronization. `lr` may be a mapping from the step to the outer learning rate.

    `over_senders` and `clips`: with the rules of Covenant-72B.
    """
    theta: np.ndarray | None = None
    errors: list[np.ndarray] = []

    def synchronize(t: int, nets: list[nn.Module], _: float) -> None:
        nonlocal theta, errors
        if len(nets) == 1 or t % every:
            return
        if theta is None:
            theta = backwards(model(), K)  # the initial model of all groups
            errors = [np.zeros_like(theta) for _ in nets]
        moved = [theta - backwards(net, K) for net in nets]
        errors = [beta * e + delta for e, delta in zip(errors, moved, strict=True)]
        picked = select(errors)
        arrived = [said(e, chosen, K, ARRIVES[bits]) for e, chosen in zip(errors, picked, strict=True)]
        errors = [e - one for e, one in zip(errors, arrived, strict=True)]
        if clips:
            norms = [float(np.linalg.norm(one)) for one in arrived]
            middle = sorted(norms)[(len(norms) - 1) // 2]
            arrived = [one * min(1.0, middle / n) for one, n in zip(arrived, norms, strict=True)]
        counts = np.zeros_like(theta)
        for chosen in picked:
            counts[chosen] += 1
        mean = sum(arrived) / (np.maximum(counts, 1) if over_senders else len(nets))
        theta = theta - (lr[t] if isinstance(lr, Mapping) else lr) * mean
        for net in nets:
            put(net, theta)

    return synchronize


def said(e: np.ndarray, chosen: np.ndarray, K: int, arrives: Arrives) -> np.ndarray:
    """Return the part of e that the other groups receive. Each shard's values are packed separately."""
    arrived, n = np.zeros_like(e), len(e) // K
    for low in range(0, len(e), n):
        mine = chosen[(chosen >= low) & (chosen < low + n)]
        arrived[mine] = arrives(e[mine])
    return arrived


def backwards(net: nn.Module, K: int) -> np.ndarray:
    parts = [p.detach().reshape(-1).numpy().copy() for p in reversed(list(net.parameters()))]
    return filled(np.concatenate(parts), K)


def put(net: nn.Module, w: np.ndarray) -> None:
    stop = sum(p.numel() for p in net.parameters())
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.from_numpy(w[stop - p.numel() : stop].copy()).view_as(p))
            stop -= p.numel()
