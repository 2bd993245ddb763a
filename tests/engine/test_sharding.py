"""Optimizer state can be cut, made whole again, and moved to other numbers of ranks and memory orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from hpcsgd import DistributedOptimizer, UserError, hierarchical
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.engine.in_parts import ELEMENTWISE, is_elementwise
from hpcsgd.engine.qhadam import QHAdam

Make = Callable[[nn.Module], optim.Optimizer]

MAKERS: dict[str, Make] = {
    "SGD": lambda net: optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda net: optim.Adam(net.parameters(), lr=0.01, amsgrad=True),
    "AdamW": lambda net: optim.AdamW(net.parameters(), lr=0.01),
    "NAdam": lambda net: optim.NAdam(net.parameters(), lr=0.01),
    "RAdam": lambda net: optim.RAdam(net.parameters(), lr=0.01),
    "Adamax": lambda net: optim.Adamax(net.parameters(), lr=0.01),
    "Adagrad": lambda net: optim.Adagrad(net.parameters(), lr=0.1),
    "Adadelta": lambda net: optim.Adadelta(net.parameters(), lr=0.5),
    "RMSprop": lambda net: optim.RMSprop(net.parameters(), lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda net: optim.Rprop(net.parameters(), lr=0.01),
    "ASGD": lambda net: optim.ASGD(net.parameters(), lr=0.1, t0=2),
    "QHAdam": lambda net: QHAdam(net.parameters(), lr=0.01, betas=(0.8, 0.9), bias_correction=True),
}


class Strange(nn.Module):
    """A model with a channels_last convolution, and 0-dimensional, one-element and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.conv = nn.Conv2d(3, 5, 2, dtype=torch.float64)
        with torch.no_grad():
            for p in self.conv.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 3)
        self.conv.to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.shift = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.conv(x).tanh().sum((1, 2, 3)) + self.shift + self.frozen.sum()


def one(net: nn.Module, optimizer: optim.Optimizer, t: int) -> None:
    """Train one step on the same batch on all ranks, so that every P × K has to train alike."""
    x = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).clone()


def plain(make: Make, steps: int) -> tuple[nn.Module, optim.Optimizer]:
    net = Strange()
    optimizer = make(net)
    for t in range(steps):
        one(net, optimizer, t)
    return net, optimizer


States = tuple[dict[str, Any], dict[str, Any]]


def continued(world: Communicator, P: int, make: Make, start: States | None, first: int, last: int) -> States:
    """Train steps first … last − 1, and return the states of the model and the optimizer."""
    topology, net = form(world, groups=P), Strange()
    optimizer = DistributedOptimizer(make(net), net, topology, hierarchical(2), bucket_cap_mb=1e-4)
    if start is not None:
        net.load_state_dict(start[0])
        optimizer.load_state_dict(start[1])
    for t in range(first, last):
        one(net, optimizer, t)
    return {k: v.clone() for k, v in net.state_dict().items()}, optimizer.state_dict()


@pytest.mark.parametrize("name", MAKERS)
def test_state_moves_between_shapes_and_plain_torch(name: str) -> None:
    """The state moves 1 × 4 → 2 × 2 → plain torch → 1 × 3 → 1 × 1, and is compared with plain torch."""
    make, start = MAKERS[name], None
    for (P, K), last in {(1, 4): 2, (2, 2): 4}.items():
        start = threads.run(P * K, continued, P, make, start, last - 2, last)[-1]
    assert start is not None
    net = Strange()
    net.load_state_dict(start[0])
    optimizer = make(net)
    optimizer.load_state_dict({key: start[1][key] for key in ("state", "param_groups")})
    for t in (4, 5):
        one(net, optimizer, t)
    start = (net.state_dict(), optimizer.state_dict())
    for n, last in ((3, 8), (1, 10)):
        start = threads.run(n, continued, 1, make, start, last - 2, last)[0]
    net.load_state_dict(start[0])
    # Torch's load_state_dict, not ours, converts the float32 numbers of these two to the parameter's dtype.
    atol = 1e-7 if name in ("NAdam", "ASGD") else 1e-12
    torch.testing.assert_close(weights(net), weights(plain(make, 10)[0]), rtol=0, atol=atol)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_state_of_another_memory_order_is_taken(run, n: int) -> None:
    net = Strange()
    net.to(memory_format=torch.contiguous_format)
    optimizer = MAKERS["Adam"](net)
    for t in range(2):
        one(net, optimizer, t)
    start = (net.state_dict(), optimizer.state_dict())
    for state, _ in run(n, continued, 1, MAKERS["Adam"], start, 2, 4):
        for name, value in plain(MAKERS["Adam"], 4)[0].state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("P", "K"), [(1, 2), (1, 4), (2, 2)])
def test_state_looks_as_in_plain_torch(run, P: int, K: int) -> None:
    _, optimizer = plain(MAKERS["Adam"], 3)
    theirs = optimizer.state_dict()
    for _, ours in run(P * K, continued, P, MAKERS["Adam"], None, 0, 3):
        assert ours["param_groups"] == theirs["param_groups"]
        assert set(ours["state"]) == set(theirs["state"])
        for number, state in theirs["state"].items():
            assert set(ours["state"][number]) == set(state)
            for name, value in state.items():
                mine = ours["state"][number][name]
                assert (mine.shape, mine.dtype, mine.stride()) == (value.shape, value.dtype, value.stride())
                torch.testing.assert_close(mine, value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_every_known_optimizer_updates_element_by_element(name: str) -> None:
    """Cutting is allowed because the parts of a vector are updated as the whole vector is."""
    generator = torch.Generator().manual_seed(0)
    whole = nn.ParameterList([torch.randn(6, generator=generator, dtype=torch.float64)])
    parts = nn.ParameterList([x.clone() for x in whole[0].detach().split([2, 4])])
    optimizers = [MAKERS[name](whole), MAKERS[name](parts)]
    assert is_elementwise(optimizers[0])
    for _ in range(5):
        whole[0].grad = torch.randn(6, generator=generator, dtype=torch.float64)
        for part, grad in zip(parts, whole[0].grad.split([2, 4]), strict=True):
            part.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    joined = torch.cat([part.detach() for part in parts])
    torch.testing.assert_close(whole[0].detach(), joined, rtol=0, atol=1e-15)


def test_unknown_optimizers_and_subclasses_are_not_taken_for_element_wise() -> None:
    class Mine(optim.SGD):
        pass

    assert {type(make(nn.Linear(1, 1))) for make in MAKERS.values()} == set(ELEMENTWISE)
    assert not is_elementwise(Mine(nn.Linear(1, 1).parameters(), lr=0.1))
    assert not is_elementwise(optim.LBFGS(nn.Linear(1, 1).parameters()))


@pytest.mark.parametrize("n", [1, 2])
def test_state_that_does_not_fit_is_refused(run, n: int) -> None:
    def load(world: Communicator) -> str:
        net = Strange()
        optimizer = DistributedOptimizer(MAKERS["SGD"](net), net, form(world), hierarchical(2))
        with pytest.raises(UserError) as raised:
            optimizer.load_state_dict(MAKERS["SGD"](nn.Linear(2, 2)).state_dict())
        return str(raised.value)

    expected = "optimizer state for param groups of [2] parameters; the optimizer has [5]"
    assert run(n, load) == [expected] * n
