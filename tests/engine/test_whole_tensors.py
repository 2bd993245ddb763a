"""Optimizers that need whole tensors, and everything that torch puts between model and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from hpcsgd import DistributedOptimizer, bsp, hierarchical
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from references import big_batch, distributed, local_sgd, one_step, vector
from references import model as make_model

STEPS = 5


class Lars(optim.Optimizer):
    """Layer-wise adaptive rate scaling without momentum: every tensor's update depends on its norms."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    trust = p.norm() / (p.grad.norm() + 1e-3)
                    p.sub_(trust * p.grad, alpha=group["lr"])


@pytest.mark.parametrize("n", [1, 2, 4])
def test_are_found_out_and_updated_whole(run, n: int) -> None:
    expected = big_batch(n, Lars, STEPS)
    for history in run(n, lambda world: distributed(world, 1, bsp(), Lars, STEPS)):
        for ours, theirs in zip(history, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("P", "K"), [(2, 2), (2, 1), (2, 4)])
def test_synchronize_on_the_shards_they_own(run, P: int, K: int) -> None:
    expected = local_sgd(P, K, 2, Lars, STEPS)
    ranks = run(P * K, lambda world: distributed(world, P, hierarchical(2), Lars, STEPS))
    for rank, history in enumerate(ranks):
        for t, ours in enumerate(history):
            torch.testing.assert_close(ours, expected[t][rank // K], rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2, 4])
def test_cut_they_would_be_wrong(run, n: int) -> None:
    """Their results would be wrong if tensors were cut, so it matters that they are recognized."""
    expected = big_batch(n, Lars, STEPS)
    ranks = run(n, lambda world: distributed(world, 1, bsp(), Lars, STEPS, elementwise=True))
    assert (ranks[0][-1] - expected[-1]).abs().max() > 1e-6


@pytest.mark.parametrize("n", [1, 2])
def test_mixed_dtypes(run, n: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = make_model(), nn.Linear(3, 3).bfloat16()
            with torch.no_grad():
                self.narrow.weight.copy_(torch.eye(3))
                self.narrow.bias.zero_()

        def forward(self, x: Tensor) -> Tensor:
            return self.narrow(self.wide(x).bfloat16()).double()

    def train(world: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        topology, net = form(world), Mixed()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, bsp())
        before = net.narrow.weight.detach().clone()
        for t in range(STEPS):
            one_step(net, optimizer, topology, t)
        return before, net.narrow.weight.detach().clone(), vector(net.wide)

    ranks = run(n, train)
    for before, narrow, wide in ranks:
        assert narrow.dtype == torch.bfloat16
        assert not torch.equal(before, narrow)
        assert torch.equal(narrow, ranks[0][1])
        assert torch.equal(wide, ranks[0][2])


@pytest.mark.parametrize("n", [1, 2])
def test_autocast_trains(run, n: int) -> None:
    def train(world: Communicator) -> tuple[float, float]:
        topology, net = form(world), make_model(dtype=torch.float32)
        optimizer = DistributedOptimizer(optim.Adam(net.parameters(), lr=0.02), net, topology, bsp())
        generator = torch.Generator().manual_seed(world.rank)
        x = torch.randn(64, 5, generator=generator)
        y = (x[:, 0] > 0).long()
        losses = []
        for _ in range(40):
            with torch.autocast("cpu", torch.bfloat16):
                value = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return losses[0], losses[-1]

    for first, last in run(n, train):
        assert last < first / 2


@pytest.mark.parametrize("n", [1, 2])
def test_compiled_models_train_alike(run, n: int) -> None:
    def train(world: Communicator) -> tuple[Tensor, Tensor]:
        topology = form(world)
        results = []
        for wrap in (lambda net: net, lambda net: torch.compile(net, backend="eager")):
            net = make_model()
            optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, bsp())
            compiled: Any = wrap(net)
            for t in range(STEPS):
                one_step(compiled, optimizer, topology, t)
            results.append(vector(net))
        return results[0], results[1]

    for eager, compiled in run(n, train):
        torch.testing.assert_close(eager, compiled, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2])
def test_unused_parameters_stay_as_they_are(run, n: int) -> None:
    def train(world: Communicator) -> tuple[Tensor, Tensor]:
        topology, net = form(world), make_model()
        net.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
        inner = optim.SGD(net.parameters(), lr=0.1, weight_decay=0.5)
        optimizer = DistributedOptimizer(inner, net, topology, bsp(), bucket_cap_mb=1e-4)
        for t in range(2):
            one_step(net, optimizer, topology, t)
        return net.unused.detach().clone(), vector(net)

    ranks = run(n, train)
    for unused, whole in ranks:
        assert torch.equal(unused, torch.ones(3, dtype=torch.float64))
        assert torch.equal(whole, ranks[0][1])
