"""Guards against a group whose data are noise from some step on: the others train as if it was not there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.methods import Method, delayed, diloco, hierarchical, streaming
from hpcsgd.parts.averagers import PseudoGradientPenalty

P, NOISY = 4, 1
EVERY, NOISE_FROM, STEPS = 4, 200, 600
BATCH, TESTED = 32, 500
LAST = 10
"""The number of last synchronizations over which losses are averaged."""


def digits() -> tuple[Tensor, Tensor]:
    """Return the digits in an order that does not depend on who wrote them."""
    data, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / (8 if p.ndim == 2 else 100))
    return net


def final_loss(
    world: Communicator, x: Tensor, y: Tensor, new: Callable[[], Method], noisy: int | None
) -> float:
    """Return the loss after the last synchronizations.

    The group `noisy` sees random pixels with random labels.
    """
    group = world.rank if world.size == P else world.rank + (world.rank >= NOISY)
    generator = torch.Generator().manual_seed(group)
    net, losses = network(), list[float]()
    optimizer = hpcsgd.DistributedOptimizer(
        optim.SGD(net.parameters(), lr=0.1), net, form(world, world.size), new()
    )
    for t in range(1, STEPS + 1):
        drawn = torch.randint(TESTED, len(y), (BATCH,), generator=generator)
        inputs, labels = x[drawn], y[drawn]
        if group == noisy and t > NOISE_FROM:
            inputs = 3 * torch.randn(inputs.shape, generator=generator)
            labels = torch.randint(0, 10, labels.shape, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        if t > STEPS - LAST * EVERY:
            with torch.no_grad():
                losses.append(nn.functional.cross_entropy(net(x[:TESTED]), y[:TESTED]).item())
    return fmean(losses[EVERY - 1 :: EVERY])


Guard = PseudoGradientPenalty | None
MAKERS: dict[str, Callable[[Guard], Method]] = {
    "delayed": lambda guard: delayed(hierarchical(EVERY, guard=guard), 2),
    "diloco": lambda guard: diloco(EVERY, partial(optim.SGD, lr=0.7, momentum=0.5), guard=guard),
    "hierarchical": lambda guard: hierarchical(EVERY, guard=guard),
    "streaming": lambda guard: streaming(diloco(EVERY, guard=guard), 2, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "hierarchical" else pytest.mark.long) for name in MAKERS]
)
def test_noise_in_one_group_costs_the_others_less_than_a_percent(name: str) -> None:
    """The loss is compared with that of the other groups alone.

    With the plain mean it would be several times as large.
    """

    def loss(groups: int, guard: Guard, noisy: int | None) -> float:
        return threads.run(groups, final_loss, x, y, lambda: MAKERS[name](guard), noisy)[0]

    x, y = digits()
    guard = PseudoGradientPenalty()
    without = loss(P - 1, guard, None)
    assert loss(P, guard, NOISY) == pytest.approx(without, rel=0.01)
    assert loss(P, None, NOISY) > 2 * without
