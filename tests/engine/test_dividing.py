"""Optimizers that look at whole tensors, with one owner for each: as if all positions updated all of w."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

import hpcsgd
from hpcsgd import DistributedOptimizer, bsp, diloco, hierarchical
from hpcsgd.core.topology import form
from hpcsgd.engine.muon import hidden_matrices, muon
from hpcsgd.methods import Method
from hpcsgd.models.gpt import gpt
from hpcsgd.transport import Transport

STEPS = 4
TYPES = 17


class Language(nn.Module):
    """A small gpt, with a matrix that is frozen, one that nobody uses and one of an odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt(TYPES, width=12, layers=3, heads=2)
        self.unused = nn.Linear(5, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.mixed = nn.Linear(TYPES, TYPES, bias=False)
        self.last = nn.Linear(TYPES, TYPES)
        generator = torch.Generator().manual_seed(0)  # torch's own is shared by all threads
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, device="cpu") / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mixed(self.gpt(x)))


def loss_of(net: nn.Module, t: int, rank: int) -> Tensor:
    x = torch.randint(0, TYPES, (2, 6), generator=torch.Generator().manual_seed(100 * t + rank), device="cpu")
    return cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def trained(
    world: Transport, P: int, method: Method, make: Callable[[nn.Module], optim.Optimizer], **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """The model, the optimizer's state over whole parameters, and the elements of state on this rank."""
    job, net = form(world, groups=P), Language()
    options = {"bucket_mb": 5e-3, **options}
    optimizer = DistributedOptimizer(make(net), net, job, method, **options)
    passes = options.get("accumulate", 1)
    for t in range(STEPS):
        optimizer.zero_grad()
        for i in range(passes):
            loss = loss_of(net, passes * t + i, job.rank)
            loss.backward()
        optimizer.step(loss=loss)
    kept = sum(x.numel() for state in optimizer.state.values() for x in state.values() if x.dim())
    return {n: p.detach().clone() for n, p in net.named_parameters()}, state_of(optimizer), kept


def state_of(optimizer: optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{i}.{name}": x.clone() for i, values in state.items() for name, x in values.items()}


def two_rates(net: nn.Module) -> optim.Optimizer:
    """Muon of two param groups, AdamW of two more."""
    hidden = hidden_matrices(net)
    rest = [p for p in net.parameters() if p not in set(hidden) and p.requires_grad]
    return hpcsgd.Joined(
        optim.Muon([{"params": hidden[::2], "lr": 0.05}, {"params": hidden[1::2]}], lr=0.02),
        optim.AdamW([{"params": rest[::2], "lr": 0.01}, {"params": rest[1::2]}], lr=0.005),
    )


MAKERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "muon": lambda net: muon(net, lr=0.02),
    "two rates": two_rates,
    "Adafactor": lambda net: optim.Adafactor(net.parameters(), lr=0.02),
}
GATHERED = {"elementwise": False, "tensorwise": False}


def assert_same(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, value in mine.items():
        assert value.stride() == expected[name].stride(), name
        assert torch.equal(value, expected[name]), name


METHODS: dict[str, Callable[[], Method]] = {
    "bsp": bsp,
    "hierarchical": lambda: hierarchical(2),
    "diloco": lambda: diloco(every=2, outer=lambda params: optim.SGD(params, lr=0.7, momentum=0.9)),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("P", "K"), [(1, 2), (1, 3), (1, 4), (2, 2), (3, 1)])
def test_as_when_everybody_updates_everything(run, P: int, K: int, name: str) -> None:
    def both(world: Transport) -> Any:
        return [trained(world, P, hierarchical(2), MAKERS[name], **o) for o in ({}, GATHERED)]

    for (model, state, _), (theirs, their_state, _) in run(P * K, both):
        assert_same(model, theirs)
        assert_same(state, their_state)
