"""The family of local SGD in plain torch: functions that change the groups' nets after each step."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn, optim

from references import (
    MakeOptimizer,
    Rates,
    Synchronize,
    average,
    batch,
    gathered_gradient,
    gathered_step,
    loss,
    model,
    set_vector,
    vector,
)


def fed_averaging(P: int, C: float, synchronizes: Callable[[int], bool], seed: int = 0) -> Synchronize:
    """Return a synchronization that sets all groups to the mean of ⌈C·P⌉ groups, drawn by `random`."""

    def synchronize(t: int, nets: list[nn.Module], _: float) -> None:
        if synchronizes(t):
            drawn = random.Random(f"{seed} {t}").sample(range(P), math.ceil(C * P))
            mean = torch.stack([vector(nets[g]) for g in drawn]).mean(0)
            for net in nets:
                set_vector(net, mean)

    return synchronize


Outer = Mapping[int, tuple[float, float]]
"""The outer learning rate and momentum, by the step after which groups synchronize."""


def with_outer(every: int, make: MakeOptimizer, values: Outer | None = None) -> Synchronize:
    """Return a synchronization with an outer step of torch's optimizer on whole parameters."""
    outer = model()
    optimizer = make(list(outer.parameters()))

    def synchronize(t: int, nets: list[nn.Module], _: float) -> None:
        if t % every or len(nets) == 1:
            return
        mean = copy.deepcopy(nets)
        average(mean)
        for theta, theirs in zip(outer.parameters(), mean[0].parameters(), strict=True):
            theta.grad = theta.detach() - theirs.detach()
        step_with(optimizer, None if values is None else values[t])
        for net in nets:
            set_vector(net, vector(outer))

    return synchronize


def step_with(optimizer: optim.Optimizer, values: tuple[float, float] | None) -> None:
    if values is not None:
        optimizer.param_groups[0] |= {"lr": values[0], "momentum": values[1]}
    optimizer.step()


def after_a_lazy_start(every: int, make: MakeOptimizer, end: int, values: Outer) -> Synchronize:
    """Return a synchronization as in `with_outer` whose result counts only after step `end`.

    Until then the outer optimizer makes its steps, but all groups and the outer model are set to the mean.
    """
    outer = model()
    optimizer = make(list(outer.parameters()))

    def synchronize(t: int, nets: list[nn.Module], _: float) -> None:
        if t % every or len(nets) == 1:
            return
        mean = copy.deepcopy(nets)
        average(mean)
        for theta, theirs in zip(outer.parameters(), mean[0].parameters(), strict=True):
            theta.grad = theta.detach() - theirs.detach()
        step_with(optimizer, values[t] if t > end else None)
        set_vector(outer, vector(outer) if t > end else vector(mean[0]))
        for net in nets:
            set_vector(net, vector(outer))

    return synchronize


def guarding(
    every: int,
    threshold: float,
    warm_up: int,
    most: float = math.inf,
    make: MakeOptimizer | None = None,
    seen: list[set[int]] | None = None,
) -> Synchronize:
    """Return a synchronization with EDiT's penalty, in numpy, on whole vectors, from a list of all norms.

    If `make` is given, an outer step follows. A new norm has the weight 0.02. Each synchronization appends to
    `seen` the groups that were left out.
    """
    theta = vector(model()).numpy()
    outer = outer_step(make, vector(model()))
    norms: list[list[float]] = []

    def left_out(G: float, mine: list[float]) -> bool:
        if not math.isfinite(G):
            return True
        if len(mine) < warm_up:
            return False
        m, v = moments(mine)
        return G - m > threshold * math.sqrt(v)

    def synchronize(t: int, nets: list[nn.Module], _: float) -> None:
        nonlocal theta
        P = len(nets)
        if t % every or P == 1:
            return
        norms.extend([] for _ in range(P - len(norms)))
        moved = np.stack([vector(net).numpy() for net in nets]) - theta
        G = np.sqrt((moved**2).sum(1))
        out = {g for g in range(P) if left_out(G[g], norms[g])}
        for g in range(P):
            if math.isfinite(G[g]) and (g not in out or len(out) == P):
                norms[g].append(G[g])
        if seen is not None:
            seen.append(out)
        if len(out) < P:
            kept = [g for g in range(P) if g not in out]
            a = np.exp(-G[kept] / np.median(G[kept]))
            change = (a / a.sum()) @ moved[kept]
            change *= min(1, most / (np.linalg.norm(change) + 1e-6))
            theta = outer(torch.from_numpy(theta + change), None).numpy()
        for net in nets:
            set_vector(net, torch.from_numpy(theta))

    return synchronize


def moments(norms: list[float]) -> tuple[float, float]:
    """Return the weighted mean and variance of `norms`, of which the first is the oldest.

    The first 50 have equal weights; each later one gets the weight 0.02 when it is added.
    """
    weights = np.ones(1)
    for n in range(2, len(norms) + 1):
        r = max(0.02, 1 / n)
        weights = np.append(weights * (1 - r), r)
    mean = float(weights @ norms)
    return mean, float(weights @ (np.array(norms) - mean) ** 2)


def paired(every: int, alpha: float, beta: float, gamma: float, seed: int = 0) -> Synchronize:
    """Return a synchronization of NoLoCo as in its paper, in numpy, on whole vectors.

    If the number of groups is odd, one group after the other stays without a partner.
    """
    phi: np.ndarray | None = None
    delta = np.zeros(())

    def synchronize(t: int, nets: list[nn.Module], _: float) -> None:
        nonlocal phi, delta
        P = len(nets)
        if t % every or P == 1:
            return
        if phi is None:
            phi = np.stack([vector(model()).numpy()] * P)
            delta = np.zeros_like(phi)
        theta = np.stack([vector(net).numpy() for net in nets])
        moved, before = theta - phi, phi.copy()
        for n in drawn_pairs(P, t // every, f"{seed} {t}"):
            together = moved[n].mean(0)
            for i in n:
                delta[i] = alpha * delta[i] + beta * together - gamma * (before[i] - before[n].mean(0))
        phi = before + delta
        for net, mine in zip(nets, phi, strict=True):
            set_vector(net, torch.from_numpy(mine))

    return synchronize


def drawn_pairs(P: int, number: int, seed: str) -> list[list[int]]:
    """Return the pairs of groups in synchronization `number`, in the order of a shuffle by `random`."""
    left = [g for g in range(P) if P % 2 == 0 or g != number % P]
    random.Random(seed).shuffle(left)
    two = [left[i : i + 2] for i in range(0, len(left), 2)]
    return two if P % 2 == 0 else [*two, [number % P]]


def desynced(
    P: int, K: int, every: int, periods: Mapping[str, int], make: MakeOptimizer, steps: int
) -> list[list[Tensor]]:
    """Train P single processes that average models and optimizer states at intervals of their own.

    They average models every `every` steps, and each optimizer state in `periods` every so many steps.

    Returns:
        The parameters as [step][group].
    """
    nets = [model() for _ in range(P)]
    optimizers = [make(list(net.parameters())) for net in nets]
    history = []
    for t in range(1, steps + 1):
        for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            gathered_step(net, optimizer, t - 1, range(g * K, (g + 1) * K))
        if t % every == 0:
            average(nets)
        average_states(nets, optimizers, {name for name, period in periods.items() if t % period == 0})
        history.append([vector(net) for net in nets])
    return history


def average_states(nets: list[nn.Module], optimizers: list[optim.Optimizer], due: set[str]) -> None:
    """Average the optimizer states whose names are in `due`, and the counts of steps.

    An optimizer that has never updated a parameter begins with zeros for it.
    """
    there = [state for optimizer in optimizers for state in optimizer.state.values()]
    names = {name for state in there for name, x in state.items() if isinstance(x, Tensor)}
    if len(nets) == 1 or not names & due:
        return
    for params in zip(*(net.parameters() for net in nets), strict=True):
        for name in sorted(names):
            states = [optimizer.state[p] for optimizer, p in zip(optimizers, params, strict=True)]
            zeros = torch.zeros(()) if name == "step" else torch.zeros_like(params[0])
            values = [state.setdefault(name, zeros.clone()).numpy() for state in states]
            if name in due | {"step"}:
                mean = torch.from_numpy(np.mean(np.stack(values), 0, keepdims=True)).view(zeros.shape)
                for state in states:
                    state[name].copy_(mean)


def adaptive(I_0: int, block: int, intervals: list[int] | None = None, rates: Rates = ()) -> Synchronize:
    """Return AdaComm's synchronization, which appends to `intervals` the interval of each step."""
    losses: list[float] = []
    I, synced, changed = I_0, 0, 0  # noqa: E741 - the papers' letter
    etas: list[float] = []
    eta_before = rates[0] if rates else 1.0

    def synchronize(t: int, nets: list[nn.Module], loss: float) -> None:
        nonlocal I, synced, changed, eta_before  # noqa: E741
        losses.append(loss)
        etas.append(rates[t - 1] if rates else 1.0)
        if intervals is not None:
            intervals.append(I)
        if t - synced < I:
            return
        average(nets)
        synced = t
        if t - changed >= block:
            F, eta = sum(losses[changed:]) / (t - changed), etas[-1]
            by_loss = math.ceil(math.sqrt(max(etas) / eta * F / losses[0]) * I_0)
            before = math.sqrt(max(eta_before / eta, 1)) * I
            I = max(1, by_loss if by_loss < before else math.ceil(before / 2))  # noqa: E741
            changed, eta_before = t, eta

    return synchronize


def accumulating(
    P: int, every: int, rates: list[float], gradients: Callable[[int, Tensor], list[Tensor]]
) -> list[list[Tensor]]:
    """Train by SASGD's definition, on vectors, and return the parameters as [step][group].

    `gradients(t, w)` returns for each group g its gradient at w[g].
    """
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


def gradients_of(K: int) -> Callable[[int, Tensor], list[Tensor]]:
    """Return the argument `gradients` of `accumulating`, for groups of K ranks."""

    def gradients(t: int, w: Tensor) -> list[Tensor]:
        found, net = [], model()
        for g, theirs in enumerate(w):
            set_vector(net, theirs)
            batches = [batch(t, rank) for rank in range(g * K, (g + 1) * K)]
            value = loss(net, torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
            grads = torch.autograd.grad(value, list(net.parameters()), materialize_grads=True)
            found.append(torch.cat([each.reshape(-1) for each in grads]))
        return found

    return gradients


NESTEROV: MakeOptimizer = lambda params: optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)  # noqa: E731


def selective(
    P: int,
    K: int,
    delta: float,
    by: str,
    make: MakeOptimizer,
    steps: int,
    window: int,
    smoothing: float,
) -> tuple[list[list[Tensor]], list[bool]]:
    """Train P single processes by SelSync's algorithm 1.

    Returns:
        The parameters as [step][group], and for each step whether it was significant.
    """
    nets = [model() for _ in range(P)]
    optimizers = [make(list(net.parameters())) for net in nets]
    norms: list[list[float]] = [[] for _ in nets]
    history, synced = [], []
    for t in range(steps):
        for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            gathered_gradient(net, optimizer, t, range(g * K, (g + 1) * K))
            norms[g].append(sum(p.grad.square().sum().item() for p in net.parameters() if p.grad is not None))
        synced.append(t == 0 or any(changes(own, window, smoothing)[-1] >= delta for own in norms))
        if synced[-1] and by == "gradients" and P > 1:
            average_gradients(nets)
        for optimizer in optimizers:
            optimizer.step()
        if synced[-1] and by == "parameters":
            average(nets)
        history.append([vector(net) for net in nets])
    return history, synced


def changes(norms: list[float], window: int, smoothing: float) -> list[float]:
    """Return Δ of each step except the first, by eq. 2 with the moving average computed in full."""

    def average(i: int) -> float:
        weights = [(1 - smoothing) ** age for age in range(min(window, i + 1))]
        return sum(w * norms[i - age] for age, w in enumerate(weights)) / sum(weights)

    return [abs(average(i) - average(i - 1)) / average(i - 1) for i in range(1, len(norms))]


def average_gradients(nets: list[nn.Module]) -> None:
    """Average the gradients of each parameter for which any net has one; a missing one counts as zero."""
    for params in zip(*(net.parameters() for net in nets), strict=True):
        if any(p.grad is not None for p in params):
            mean = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in params]).mean(0)
            for p in params:
                p.grad = mean.clone()


Arrive = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes the new values of a fragment. The arguments are its values now, its values when the
synchronization began, and the result of the synchronization."""


def carried(now: Tensor, then: Tensor, theta: Tensor) -> Tensor:
    return theta + (now - then)


def blended(alpha: float) -> Arrive:
    return lambda now, then, theta: alpha * now + (1 - alpha) * theta


def in_turn(
    every: int,
    F: int,
    delay: int,
    arrive: Arrive,
    make: MakeOptimizer | None = None,
    values: Outer | None = None,
    fewest: int = 2,
) -> Synchronize:
    """Return a synchronization of F fragments, one after the other, on whole vectors.

    The result of a fragment is applied by `arrive`, `delay` steps after its synchronization began. Without
    `fewest` groups, nothing happens.
    """
    start, parts = vector(model()), strides(model(), F)
    outer = [outer_step(make, start[part]) for part in parts]
    under_way: dict[int, tuple[int, Tensor, Tensor]] = {}

    def synchronize(t: int, nets: list[nn.Module], _: float) -> None:
        if len(nets) < fewest:
            return
        w = torch.stack([vector(net) for net in nets])

        def take_in() -> None:
            for p in [p for p, (due, *_) in under_way.items() if due == t]:
                _, then, theta = under_way.pop(p)
                w[:, parts[p]] = arrive(w[:, parts[p]], then, theta)

        take_in()
        for p, part in enumerate(parts):
            if (t + p * every // F) % every == 0:
                then = w[:, part].clone()
                under_way[p] = (
                    t + delay,
                    then,
                    outer[p](then.mean(0), None if values is None else values[t]),
                )
        take_in()
        for net, mine in zip(nets, w, strict=True):
            set_vector(net, mine)

    return synchronize


def outer_step(
    make: MakeOptimizer | None, start: Tensor
) -> Callable[[Tensor, tuple[float, float] | None], Tensor]:
    """Return a function of the mean and of the outer rate and momentum that computes the averaged model.

    Without `make` this is the mean.
    """
    if make is None:
        return lambda mean, _: mean
    theta = nn.Parameter(start.clone())
    optimizer = make([theta])

    def step(mean: Tensor, values: tuple[float, float] | None) -> Tensor:
        theta.grad = theta.detach() - mean
        step_with(optimizer, values)
        return theta.detach().clone()

    return step


def strides(net: nn.Module, F: int) -> list[Tensor]:
    """Return the indices in the whole vector of the elements of each of F fragments.

    Modules are split, in their order, into parts of at most an F-th of the model. Each part goes to the
    fragment with the fewest elements.
    """
    modules: dict[str, list[int]] = {}
    M = 0
    for name, p in net.named_parameters():
        modules.setdefault(name.rpartition(".")[0], []).extend(range(M, M + p.numel()))
        M += p.numel()
    found: list[list[int]] = [[] for _ in range(F)]
    for elements in modules.values():
        n = math.ceil(len(elements) / math.ceil(M / F))
        edges = [i * len(elements) // n for i in range(n + 1)]
        for low, high in itertools.pairwise(edges):
            min(found, key=len).extend(elements[low:high])
    return [torch.tensor(elements, dtype=torch.long, device="cpu") for elements in found]
