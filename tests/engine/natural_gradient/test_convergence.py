"""Natural gradient needs fewer steps where a few directions are far larger than all others.

Inputs have three directions of variance 225; all others have variance 1. The estimates have to find the
three. Noise in the targets makes the gradients noisy, most of all along the large directions.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

from hpcsgd import NaturalGradient

D, K = 60, 8
STEPS = 500
RATES = (0.001, 0.002, 0.004, 0.008, 0.016)


class Problem:
    """The least-squares problem y = W x + noise, with the same minibatches every time."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        sizes = torch.ones(D)
        sizes[:3] = 15.0
        self._mix = sizes[:, None] * torch.linalg.qr(self._randn(D, D)).Q
        self._W = self._randn(K, D)

    def batch(self) -> tuple[Tensor, Tensor]:
        x = self._randn(32, D) @ self._mix
        return x, x @ self._W.T + 2 * self._randn(32, K)

    def excess(self, W: Tensor) -> float:
        """Return the expected loss above its minimum, per output."""
        return ((W - self._W) @ self._mix.T).square().sum().item() / K

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)


def steps_to(goal: float, wrap: Callable[[optim.Optimizer, nn.Module], optim.Optimizer], lr: float) -> int:
    """Return how many steps it takes until the excess is below `goal`, at most STEPS."""
    problem, net = Problem(), nn.Linear(D, K, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = wrap(optim.SGD(net.parameters(), lr=lr), net)
    for t in range(STEPS):
        if problem.excess(net.weight) < goal:
            return t
        x, y = problem.batch()
        optimizer.zero_grad()
        (net(x) - y).square().sum(1).mean().div(2).backward()
        optimizer.step()
    return STEPS


def plain(optimizer: optim.Optimizer, _: nn.Module) -> optim.Optimizer:
    return optimizer


def natural(optimizer: optim.Optimizer, net: nn.Module) -> optim.Optimizer:
    return NaturalGradient(optimizer, net, rank=8)


@pytest.mark.slow
@pytest.mark.parametrize("goal", [3.0, 10.0])
def test_half_the_steps_at_the_rate_that_is_best_for_sgd(goal: float) -> None:
    theirs = {lr: steps_to(goal, plain, lr) for lr in RATES}
    best = min(theirs, key=lambda lr: theirs[lr])
    assert theirs[best] < STEPS
    assert steps_to(goal, natural, best) < theirs[best] / 2


def test_a_network_learns_faster_too() -> None:
    """A network learns the function of a smaller one faster.

    Both use the largest rate at which either is stable.
    """

    def error(wrap: Callable[[optim.Optimizer, nn.Module], optim.Optimizer]) -> float:
        generator = torch.Generator().manual_seed(1)
        teacher = nn.Sequential(nn.Linear(D, 10), nn.Tanh(), nn.Linear(10, K))
        net = nn.Sequential(nn.Linear(D, 30), nn.Tanh(), nn.Linear(30, K))
        with torch.no_grad():
            for size, made in ((1 / 4, teacher), (1 / 8, net)):
                for p in made.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator) * size)
        optimizer = wrap(optim.SGD(net.parameters(), lr=1.0), net)
        problem, losses = Problem(), []
        for _ in range(STEPS):
            x = problem.batch()[0] / 4
            loss = (net(x) - teacher(x).detach()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses[-50:]) / 50

    assert error(natural) < 0.6 * error(plain)
