"""Changes of a model and its optimizer that are allowed after wrapping do not change the training."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import prune

from hpcsgd import DistributedOptimizer, bsp
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from references import model as make_model
from references import one_step, vector


def pruned(net: nn.Module) -> None:
    prune.random_unstructured(net[0], "bias", amount=0)


def copied(net: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(net.parameters()).detach()
    for param, part in zip(
        net.parameters(), vector.split([p.numel() for p in net.parameters()]), strict=True
    ):
        param.data.copy_(part.view_as(param))


def frozen_and_free(net: nn.Module) -> None:
    net[0].requires_grad_(False).requires_grad_(True)


def with_a_buffer(net: nn.Module) -> None:
    net[1].register_buffer("seen", torch.zeros(2).double())
    net.register_buffer("alike", torch.zeros(1).double())


SAME_TRAINING: dict[str, Callable[[nn.Module], object]] = {
    "a copy in shared memory": lambda net: copy.deepcopy(net).share_memory(),
    "copied from a vector": copied,
    "loaded": lambda net: net.load_state_dict(net.state_dict()),
    "frozen and free": frozen_and_free,
    "a buffer": with_a_buffer,
    "another activation": lambda net: net.__setitem__(1, nn.Tanh()),
    "a layer without parameters": lambda net: net.append(nn.Identity()),
    "a frozen layer in between": lambda net: net.append(nn.Sequential()),
    "pruned": pruned,
    "parametrized": lambda net: nn.utils.parametrize.register_parametrization(
        net[0], "weight", nn.Identity()
    ),
    "train and eval": lambda net: net.eval().train(),
    "a hook": lambda net: net[0].register_forward_hook(lambda *_: None),
    "one layer twice": lambda net: net[1].register_module("again", net[0]),
    "a new frozen parameter": lambda net: net.register_parameter(
        "scale", nn.Parameter(torch.ones(1).double(), requires_grad=False)
    ),
}


@pytest.mark.parametrize("change", SAME_TRAINING)
@pytest.mark.parametrize("n", [1, 2])
def test_what_leaves_the_parameters_in_place_is_allowed(run, n: int, change: str) -> None:
    def train(world: Communicator) -> list[torch.Tensor]:
        topology, found = form(world), []
        for changes in (False, True):
            net = make_model()
            optimizer = DistributedOptimizer(
                optim.SGD(net.parameters(), 0.1, momentum=0.9), net, topology, bsp()
            )
            params = list(net.parameters())
            for t in range(4):
                if t == 2 and changes:
                    SAME_TRAINING[change](net)
                one_step(net, optimizer, topology, t)
            found.append(torch.cat([p.detach().flatten() for p in params]))
        return found

    for expected, found in run(n, train):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("n", [1, 2])
def test_layers_that_start_anew_train_on(run, n: int) -> None:
    def train(world: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        topology, net = form(world), make_model()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), 0.1), net, topology, bsp())
        net[2].reset_parameters()
        return vector(net), one_step(net, optimizer, topology, 0)

    for before, after in run(n, train):
        assert not torch.equal(before, after)


@pytest.mark.parametrize("n", [1, 2])
def test_a_state_that_is_cleared_in_place_starts_anew(run, n: int) -> None:
    def train(world: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        topology, found = form(world), []
        for wrapped in (False, True):
            net = make_model()
            optimizer: optim.Optimizer = optim.SGD(net.parameters(), 0.1, momentum=0.9)
            if wrapped:
                optimizer = DistributedOptimizer(optimizer, net, topology, bsp())
            for t in range(3):
                optimizer.zero_grad()
                torch.stack([(p**2).sum() for p in net.parameters()]).sum().backward()
                optimizer.step()
                if t == 1:
                    optimizer.state.clear()
            found.append(vector(net))
        return found[0], found[1]

    for expected, found in run(n, train):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
