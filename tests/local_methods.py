"""The family of local SGD in plain torch: what becomes of the groups' nets after each step."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn, optim

from references import MakeOptimizer, Meet, average, model, set_vector, vector


def fed_averaging(P: int, C: float, meets: Callable[[int], bool], seed: int = 0) -> Meet:
    """Everybody gets the mean of those drawn: the order in which Python's own generator hands them out."""

    def meet(t: int, nets: list[nn.Module], _: float) -> None:
        if meets(t):
            drawn = random.Random(f"{seed} {t}").sample(range(P), math.ceil(C * P))
            mean = torch.stack([vector(nets[g]) for g in drawn]).mean(0)
            for net in nets:
                set_vector(net, mean)

    return meet


def with_outer(every: int, make: MakeOptimizer) -> Meet:
    """Whole parameters, and the optimizer of torch on them."""
    outer = model()
    optimizer = make(list(outer.parameters()))

    def meet(t: int, nets: list[nn.Module], _: float) -> None:
        if t % every or len(nets) == 1:
            return
        mean = copy.deepcopy(nets)
        average(mean)
        for theta, theirs in zip(outer.parameters(), mean[0].parameters(), strict=True):
            theta.grad = theta.detach() - theirs.detach()
        optimizer.step()
        for net in nets:
            set_vector(net, vector(outer))

    return meet


def adaptive(I_0: int, block: int, intervals: list[int] | None = None) -> Meet:
    """At a constant learning rate. Appends to `intervals` that of each step."""
    losses: list[float] = []
    I, met, changed = I_0, 0, 0  # noqa: E741 - the papers' letter

    def meet(t: int, nets: list[nn.Module], loss: float) -> None:
        nonlocal I, met, changed  # noqa: E741
        losses.append(loss)
        if intervals is not None:
            intervals.append(I)
        if t - met < I:
            return
        average(nets)
        met = t
        if t - changed >= block:
            F = sum(losses[changed:]) / (t - changed)
            by_loss = math.ceil(math.sqrt(F / losses[0]) * I_0)
            I = max(1, by_loss if by_loss < I else math.ceil(I / 2))  # noqa: E741
            changed = t

    return meet


def accumulating(
    P: int, every: int, rates: list[float], gradients: Callable[[int, Tensor], list[Tensor]]
) -> list[list[Tensor]]:
    """SASGD by its definition, on vectors: `gradients(t, w)` are those of group g at w[g]. [step][group]."""
    agreed = vector(model())
    w, history = torch.stack([agreed] * P), []
    total = torch.zeros_like(w)
    for t, rate in enumerate(rates):
        g = torch.stack(gradients(t, w))
        total += g
        w = w - rate * g
        if (t + 1) % every == 0 and P > 1:
            agreed = agreed - rate * total.mean(0)
            w, total = torch.stack([agreed] * P), torch.zeros_like(w)
        history.append(list(w))
    return history


NESTEROV: MakeOptimizer = lambda params: optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)  # noqa: E731
