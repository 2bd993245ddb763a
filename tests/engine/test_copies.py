"""What may be copied of a training, and what is refused by name."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import hpcsgd
from hpcsgd import DistributedOptimizer, UserError
from hpcsgd.core.topology import form
from hpcsgd.transport import Transport
from references import batch, loss, model, vector

COPIES: dict[str, Callable[[nn.Module, Any], object]] = {
    "copy": lambda net, optimizer: copy.copy(optimizer),
    "deepcopy": lambda net, optimizer: copy.deepcopy(optimizer),
    "deepcopy with the model": lambda net, optimizer: copy.deepcopy({"model": net, "optimizer": optimizer}),
    "pickle": lambda net, optimizer: pickle.dumps(optimizer),
    "torch.save": lambda net, optimizer: torch.save({"optimizer": optimizer}, io.BytesIO()),
}


def made(world: Transport, P: int) -> tuple[nn.Module, Any]:
    net = model()
    inner = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, DistributedOptimizer(inner, net, form(world, P), hpcsgd.hierarchical(2))


def train(world: Transport, net: nn.Module, optimizer: Any, steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss(net, *batch(t, world.rank)).backward()
        optimizer.step()


@pytest.mark.threads(unless={"K": 2})
@pytest.mark.parametrize(("P", "K"), [(1, 1), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_the_optimizer_is_refused_and_training_goes_on(run, kind: str, P: int, K: int) -> None:
    def body(world: Transport) -> None:
        net, optimizer = made(world, P)
        train(world, net, optimizer, range(2))
        with pytest.raises(UserError, match=r"cannot be copied or pickled: save optimizer\.state_dict\(\)"):
            COPIES[kind](net, optimizer)
        train(world, net, optimizer, range(2, 4))
        other, untouched = made(world, P)
        train(world, other, untouched, range(4))
        assert torch.equal(vector(net), vector(other))

    run(P * K, body)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("P", [1, 2])
def test_a_copy_of_the_model_is_a_model_of_its_own(run, P: int) -> None:
    """As one that keeps a moving average of the parameters."""

    def body(world: Transport) -> None:
        net, optimizer = made(world, P)
        train(world, net, optimizer, range(2))
        other, before = copy.deepcopy(net), vector(net)
        train(world, net, optimizer, range(2, 4))
        assert torch.equal(vector(other), before)
        assert not torch.equal(vector(net), before)
        with torch.no_grad():
            for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
                theirs.lerp_(mine, 0.5)
        loss(other, *batch(0, world.rank)).backward()
        torch.testing.assert_close(vector(other), (before + vector(net)) / 2)

    run(2, body)
