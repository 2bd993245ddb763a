"""A backward pass through a graph of earlier weights raises torch's exception, as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from hpcsgd import DistributedOptimizer, bsp, hierarchical
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.methods import Method
from references import batch, loss
from references import model as make_model

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "each parameter in a bucket": {"bucket_cap_mb": 1e-6},
    "gathered later": {"overlap_param_gather": True},
    "whole tensors": {"elementwise": False, "tensorwise": True},
    "the whole model": {"elementwise": False, "tensorwise": False},
    "master weights": {"master_dtype": torch.float64},
}


class Skipping(nn.Module):
    """Two layers, of which a forward pass may use the first one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def by_two_groups(params: list[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.2}], lr=0.1)


def refuses(value: Tensor) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", [bsp, lambda: hierarchical(4), lambda: hierarchical(1)])
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_after_a_step(run, P: int, K: int, make: Callable[[], Method], options: str) -> None:
    def body(world: Communicator) -> None:
        net = make_model(dtype=torch.float32)
        inner = by_two_groups(list(net.parameters()))
        optimizer = DistributedOptimizer(inner, net, form(world, P), make(), **OPTIONS[options])
        value = loss(net, *batch(0, world.rank, torch.float32))
        value.backward(retain_graph=True)
        optimizer.step()
        refuses(value)

    run(P * K, body)


@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2)])
def test_after_an_average(run, P: int, K: int) -> None:
    def body(world: Communicator) -> None:
        net = make_model()
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, net, form(world, P), hierarchical(4))
        value = loss(net, *batch(0, world.rank))
        optimizer.average_models()
        refuses(value)

    run(P * K, body)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_graphs_of_what_no_step_has_changed_stay_usable(run, P: int, K: int, frozen: bool) -> None:
    """Frozen parameters, and those that no rank has used, keep their values."""

    def body(world: Communicator) -> Tensor:
        net = Skipping()
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, net, form(world, P), hierarchical(4), bucket_cap_mb=1e-6)
        net.second.requires_grad_(not frozen)
        x = torch.ones(2, 5, requires_grad=True)
        value = net.second(x).sum()
        net.first(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        value.backward()
        assert x.grad is not None
        return x.grad

    for grad in run(P * K, body):
        assert grad.any()
