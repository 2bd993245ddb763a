"""Quantizers, and training with quantized messages, written a second time in plain numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from references import MakeOptimizer, gathered_step, model, vector
from sparsifying import backwards_gradient, put_backwards

Arrives = Callable[[np.ndarray], np.ndarray]
"""Returns a vector as its receivers restore it."""


def by_blocks(bits: int, block: int) -> Arrives:
    """Return a quantizer with one scale per block, which rounds to the nearest number."""

    def arrives(x: np.ndarray) -> np.ndarray:
        parts = np.split(x.astype(np.float32), range(block, len(x), block)) if len(x) else []
        return np.concatenate([*map(one, parts), np.empty(0, np.float32)])

    def one(x: np.ndarray) -> np.ndarray:
        if bits == 2:
            return of_two_bits(x)
        most = np.float32(2 ** (bits - 1) - 1)
        scale = np.abs(x).max() / most
        if not np.isfinite(scale):
            return np.full_like(x, np.nan)
        return np.clip(np.rint(x / scale), -most, most) * scale if scale else np.zeros_like(x)

    return arrives


def of_two_bits(x: np.ndarray) -> np.ndarray:
    """Quantize to −2, −1, 0 or 1 times a scale of 1.4 times the mean magnitude.

    If the element of the largest magnitude is positive, the scale is negative, for the range from −1 to 2.
    """
    size = 1.4 * np.abs(x.astype(float)).mean()
    if not np.isfinite(size):
        return np.full_like(x, np.nan)
    scale = np.float32(min(size, np.finfo(np.float32).max / 2))
    scale = -scale if max(x.max(), 0) >= max(-x.min(), 0) else scale
    return np.clip(np.rint(x / scale), -2, 1) * scale if scale else np.zeros_like(x)


def half(x: np.ndarray) -> np.ndarray:
    """Round to 16 bits by way of 32, as torch does. Otherwise one value in 20,000 would differ."""
    return x.astype(np.float32).astype(np.float16).astype(np.float32)


def add(kept: np.ndarray, x: np.ndarray, wire: Arrives) -> None:
    """Add `x` to the error feedback `kept`. 16-bit messages have no error feedback."""
    if wire is half:
        kept[:] = 0
    kept[: len(x)] += x


def mean_of_pieces(accs: Sequence[np.ndarray], wire: Arrives) -> list[np.ndarray]:
    """Return the mean of all ranks' vectors, in one piece per rank, and leave the errors in `accs`."""
    n = len(accs)
    rows = [acc.reshape(n, -1) for acc in accs]
    means = []
    for p in range(n):
        versions = [row[p].copy() if i == p else wire(row[p]).astype(float) for i, row in enumerate(rows)]
        for row, version in zip(rows, versions, strict=True):
            row[p] -= version
        means.append(sum(versions) / n)
    return means


def mean_everywhere(accs: Sequence[np.ndarray], wire: Arrives) -> np.ndarray:
    pieces = mean_of_pieces(accs, wire)
    arrived = [wire(piece).astype(float) for piece in pieces]
    for p, acc in enumerate(accs):
        acc.reshape(len(accs), -1)[p] = (pieces[p] - arrived[p]) * len(accs)
    return np.concatenate(arrived)


def filled(x: np.ndarray, n: int) -> np.ndarray:
    return np.concatenate([x, np.zeros(-len(x) % n)])


@dataclass(frozen=True)
class Wires:
    gradients: Arrives | None = None
    parameters: Arrives | None = None
    average: Arrives | None = None


class Group:
    """A group of K ranks with a common model p. e is the part of the owners' models that p does not have yet.

    Both are vectors that have the last parameter first.
    """

    def __init__(self, K: int, make: MakeOptimizer) -> None:
        self.K, self.net = K, model()
        self.optimizer = make(list(self.net.parameters()))
        self.M = vector(self.net).numel()
        self.size = self.M + -self.M % K
        self.kept = [np.zeros(self.size) for _ in range(K)]
        self.e = np.zeros(self.size)

    def gradients(self, t: int, g: int, quantizers: Wires) -> np.ndarray:
        """Return the mean gradient of the K ranks, joined from its K shards."""
        found = [filled(backwards_gradient(self.net, t, g * self.K + j), self.K) for j in range(self.K)]
        if self.K == 1 or quantizers.gradients is None:
            return np.mean(found, 0)
        for room, gradient in zip(self.kept, found, strict=True):
            add(room, gradient, quantizers.gradients)
        return np.concatenate(mean_of_pieces(self.kept, quantizers.gradients))

    def w(self) -> np.ndarray:
        parts = [p.detach().reshape(-1).numpy() for p in reversed(list(self.net.parameters()))]
        return filled(np.concatenate(parts), self.K)

    def put(self, w: np.ndarray) -> None:
        stop = self.M
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(torch.from_numpy(w[stop - p.numel() : stop].copy()).view_as(p))
                stop -= p.numel()

    def update(self, g: np.ndarray, *, forgets: bool) -> None:
        """Update the owners' model p + e; `publish` updates p.

        With `forgets` there is no error feedback, and a parameter that no rank uses has no gradient.
        """
        self.p = self.w()
        self.put(self.p + self.e)
        put_backwards(self.net, g[: self.M])
        for p in self.net.parameters():
            if forgets and p.grad is not None and not p.grad.any():
                p.grad = None
        self.optimizer.step()

    def publish(self, wire: Arrives | None) -> None:
        if wire is None or self.K == 1:
            return
        x = self.w()
        moved = np.concatenate([wire(shard).astype(float) for shard in np.split(x - self.p, self.K)])
        self.put(self.p + moved)
        self.e = x - self.w()


class Synchronization:
    """The quantized average of the groups' models or gradients, with error feedback."""

    def __init__(self, P: int, K: int) -> None:
        self.P, self.K = P, K
        self.theta: np.ndarray | None = None
        self.kept: list[list[np.ndarray]] = []

    def mean(self, vectors: Sequence[np.ndarray], wire: Arrives) -> np.ndarray:
        """Return the mean of `vectors`, shard by shard, including the errors of earlier calls."""
        shards = [np.split(x, self.K) for x in vectors]
        size = len(shards[0][0])
        if not self.kept:
            self.kept = [[filled(np.zeros(size), self.P) for _ in vectors] for _ in range(self.K)]
        means = []
        for j, kept in enumerate(self.kept):
            for room, theirs in zip(kept, shards, strict=True):
                add(room, theirs[j], wire)
            means.append(mean_everywhere(kept, wire)[:size])
        return np.concatenate(means)

    def model(self, ws: Sequence[np.ndarray], wire: Arrives | None) -> np.ndarray:
        theta = self.theta
        if theta is None or wire is None:
            self.theta = np.mean(ws, 0)
        else:
            self.theta = theta + self.mean([w - theta for w in ws], wire)
        assert self.theta is not None
        return self.theta


def packed(
    P: int, K: int, quantizers: Wires, make: MakeOptimizer, steps: int, every: int | None
) -> list[list[Tensor]]:
    """Train P groups of K ranks that average models every `every` steps, and return [step][group].

    If `every` is None, they average gradients in every step.
    """
    groups = [Group(K, make) for _ in range(P)]
    synchronization, history = Synchronization(P, K), []
    synchronization.theta = groups[0].w()  # all groups begin with the same model
    for t in range(steps):
        if K == 1 and (every is not None or P == 1):  # there are no other ranks to send gradients to
            for g, group in enumerate(groups):
                gathered_step(group.net, group.optimizer, t, range(g, g + 1))
        else:
            gs = [group.gradients(t, g, quantizers) for g, group in enumerate(groups)]
            if every is None and P > 1:
                assert quantizers.gradients is not None
                gs = [synchronization.mean(gs, quantizers.gradients)] * P
            for group, g in zip(groups, gs, strict=True):
                group.update(g, forgets=quantizers.gradients in (None, half))
        if every is not None and P > 1 and (t + 1) % every == 0:
            theta = synchronization.model([group.w() for group in groups], quantizers.average)
            for group in groups:
                group.put(theta)
        for group in groups:
            group.publish(quantizers.parameters)
        history.append([vector(group.net) for group in groups])
    return history
